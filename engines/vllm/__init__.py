"""vLLM as an engine: its own OpenAI app around its own engine, with Forebay's tap inside.

`adapter` is the one module that touches vLLM's names; `arguments`, `calls` and `ledger` are pure;
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
