"""Time as an argument: the clock port, the real clock, and the fake that tests drive by hand."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def wall_us(self) -> int:
        """Return UTC time in microseconds since the epoch; it may step backwards."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go backwards, for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` of this clock's time."""
        ...


class SystemClock:
    """The machine's own clock."""

    # The C function itself: asked a dozen times for each request, a method around it would cost more than it.
    monotonic = staticmethod(time.monotonic)

    def wall_us(self) -> int:
        """Return the machine's UTC time in microseconds."""
        return time.time_ns() // 1_000

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that stands still until `advance` moves it; sleepers wake in order of their time."""

    def __init__(self, wall_us: int = 1_700_000_000_000_000, monotonic: float = 0.0) -> None:
        self._wall_us = wall_us
        self._monotonic = monotonic
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def wall_us(self) -> int:
        """Return the fake UTC time in microseconds."""
        return self._wall_us

    def monotonic(self) -> float:
        """Return the fake monotonic time in seconds."""
        return self._monotonic

    def step_wall(self, microseconds: int) -> None:
        """Move only the wall clock, as an NTP step does (negative: backwards)."""
        self._wall_us += microseconds

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has passed ``seconds`` from now."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move time forward and let everything that was due run, in order."""
        target = self._monotonic + seconds
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            self._set(due)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._set(target)
        await _settle()

    def _set(self, monotonic: float) -> None:
        self._wall_us += round((monotonic - self._monotonic) * 1_000_000)
        self._monotonic = monotonic


async def _settle() -> None:
    """Give woken tasks their turn, and those that they wake."""
    for _ in range(10):
        await asyncio.sleep(0)
