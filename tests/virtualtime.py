"""An event loop whose time stands still while anything can run, and jumps to the next timer when nothing can.

Servers, clients and engines of one process then live through minutes in seconds, and what they measure
of each other depends on their decisions and not on how busy the machine is. Loopback sockets work: the
kernel hands bytes over within the writing call. Threads do not belong in here: their work takes real
time, while which the loop's time would run away.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_STUCK_S = 20.0  # of real time without a timer, a callback or a byte: a test that waits for ever


class Stuck(Exception):
    """Nothing is scheduled and nothing arrives: whatever is awaited will never happen."""


class _Selector(selectors.DefaultSelector):
    """Asks what is ready without waiting; if nothing is, lets the loop's time jump instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(_STUCK_S)
            if not ready:
                raise Stuck(f"nothing to wait for at {self.now:.3f} s")
            return ready
        self.now += max(0.0, timeout)
        return []


class Loop(asyncio.SelectorEventLoop):
    """The loop; use `run`."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._virtual.now


class Clock:
    """`scheduler.contracts.clock.Clock` on the virtual loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wall_us: int = 1_790_000_000_000_000):
        self._loop = loop
        self._wall_us = wall_us

    def wall_us(self) -> int:
        """Return UTC µs."""
        return self._wall_us + round(self._loop.time() * 1_000_000)

    def monotonic(self) -> float:
        """Return seconds."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(seconds)


def run(body: Coroutine[Any, Any, Result]) -> Result:
    """Run ``body`` in virtual time."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(body)
