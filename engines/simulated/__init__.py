"""A simulated engine: prefill, decode, KV blocks, prefix cache and continuous batching by a step-time model.

For laptops, tests and scale runs. Its text is made up and depends on the prompt's ids alone, so the same
prompt gives the same answer, and an answer resumed from its ids goes on as it would have.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.replica import engine, launch
    from scheduler.contracts import clock


@contextlib.asynccontextmanager
async def open_engine(
    record: "launch.Launch", time: "clock.Clock", reporter: "launch.Reporter"
) -> AsyncIterator["engine.Engine"]:
    """Open the engine that ``record`` describes; see `engines.replica.server.OpenEngine`."""
    from engines.simulated import core, ranks, replica

    simulated = replica.Simulated(core.Options.from_spec(record.spec), time)
    async with contextlib.AsyncExitStack() as stack:
        if record.rank is not None:
            await stack.enter_async_context(ranks.gathered(record.rank))
        await stack.enter_async_context(simulated.running())
        yield simulated


def follow(record: "launch.Launch", reporter: "launch.Reporter") -> None:
    """Be a rank past the first of a replica over several nodes, until it is ended."""
    from engines.simulated import ranks

    if record.rank is not None:
        ranks.follow(record.rank, reporter)
