"""An external OpenAI-compatible server under the engine contract: a simulated engine, bare, over HTTP."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from engines.http import proxy, upstream
from engines.replica import server
from scheduler.contracts import clock
from tests.contract import engine_simulated, engine_subject


@contextlib.asynccontextmanager
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[engine_subject.Subject]:
    """Yield the proxy behind the stack, before a server that knows nothing of Forebay."""
    external = engine_simulated.engine()
    async with (
        external.running(),
        server.listening(external.app, "127.0.0.1") as (address, _),
        proxy.opened(upstream.Options(f"http://{address}"), clock.SystemClock()) as inner,
        engine_subject.listening(
            inner, token_ids=False, kill=lambda: external.core.die("killed by the test")
        ) as found,
    ):
        yield found
