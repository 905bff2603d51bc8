"""Any OpenAI-compatible server as a replica's engine, over HTTP.

Forebay starts nothing here: it forwards, keeps seats and rows, and sees no token ids, so that a stream
can't be resumed elsewhere from them.
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
    from engines.http import proxy, upstream

    async with proxy.opened(upstream.Options.from_spec(record.spec), time) as engine:
        yield engine
