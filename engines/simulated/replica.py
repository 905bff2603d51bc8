"""The simulated engine as a replica's engine."""

import contextlib
from collections.abc import Callable

from starlette import types

from engines.replica import engine, steptime
from engines.simulated import adapters, app, core
from scheduler.contracts import clock


class Simulated:
    """`engines.replica.engine.Engine` over a `core.SimulatedCore`."""

    def __init__(self, options: core.Options, time: clock.Clock) -> None:
        self.core = core.SimulatedCore(options, time)
        self._adapters = adapters.Loras(options, time)
        self._app = app.Surface(self.core, time, self._adapters).app()

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the context in which it computes."""
        return self.core.running()

    @property
    def app(self) -> types.ASGIApp:
        """The OpenAI-compatible ASGI app."""
        return self._app

    @property
    def adapters(self) -> adapters.Loras:
        """Its adapters."""
        return self._adapters

    @property
    def sleeper(self) -> None:
        """None: it holds no GPU."""
        return None

    def tap(self, request_id: str) -> engine.Tap:
        """Open a request's tap."""
        return self.core.taps.open(request_id)

    def untap(self, request_id: str) -> None:
        """Close it."""
        self.core.taps.close(request_id)

    async def abort(self, request_id: str) -> None:
        """Drop all sequences of a request."""
        self.core.abort(request_id)

    def observe(self, observer: Callable[[steptime.Step], None]) -> None:
        """Call ``observer`` after each step."""
        self.core.observer = observer

    def stats(self) -> engine.EngineStats:
        """Return how the core is."""
        return self.core.stats()
