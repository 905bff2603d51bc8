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
    from engines.simulated import core, replica

    simulated = replica.Simulated(core.Options.from_spec(record.spec), time)
    async with simulated.running():
        yield simulated
