"""vLLM as an engine: its own OpenAI app around its own engine, with Forebay's tap inside.

`adapter`, `configure` and `headless` touch vLLM's names; `arguments`, `calls` and `ledger` are pure;
`forkserver` is the process that imports vLLM once and forks replicas. Importing this package imports
no vLLM.
"""

import contextlib
from typing import TYPE_CHECKING

from scheduler.contracts import clock

if TYPE_CHECKING:
    from engines.replica import engine, launch


def open_engine(
    record: "launch.Launch", time: clock.Clock, reporter: "launch.Reporter"
) -> "contextlib.AbstractAsyncContextManager[engine.Engine]":
    """Return the context manager that runs vLLM for one replica (`engines.replica.server.OpenEngine`)."""
    from engines.vllm import process

    process.prepare()
    process.bind_workers()
    from engines.vllm import adapter

    return adapter.open_engine(record, time, reporter)


def follow(record: "launch.Launch", reporter: "launch.Reporter") -> None:
    """Run the workers of a rank past the first of a replica over several nodes, until it is ended."""
    from engines.vllm import process

    process.prepare()
    process.bind_workers()
    from engines.vllm import headless

    # Rank 0 drains, and the slot ends this process after it.
    with process.deaf_to_sigterm():
        headless.follow(record, reporter)
