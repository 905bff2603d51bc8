"""The simulated engine under the engine contract."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from engines.simulated import batching, core, replica
from scheduler.contracts import clock
from tests.contract import engine_subject


def engine() -> replica.Simulated:
    """Return a simulated engine of 2 ms a step."""
    times = batching.StepTime(base=2.0, prefill=0.01, decode=0.0, kv=0.0)
    options = core.Options(model="m", seats=engine_subject.SEATS, max_context=2048, times=times)
    return replica.Simulated(options, clock.SystemClock())


@contextlib.asynccontextmanager
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[engine_subject.Subject]:
    """Yield the engine behind the stack."""
    simulated = engine()
    async with (
        simulated.running(),
        engine_subject.listening(
            simulated, kill=lambda: simulated.core.die("killed by the test")
        ) as found,
    ):
        yield found
