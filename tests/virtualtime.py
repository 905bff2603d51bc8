"""An event loop whose time stands still while anything can run, and jumps to the next timer when nothing can.

Servers, clients and engines of one process then live through minutes in seconds, and what they measure
of each other depends on their decisions and not on how busy the machine is. Loopback addresses are served
by Unix sockets: the kernel hands their bytes over within the writing call, while TCP's may still be on
their way when nothing seems to be left to do. Threads do not belong in here, for the same reason.
"""

import asyncio
import selectors
import tempfile
from collections.abc import Coroutine
from pathlib import Path
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
        self._folder = tempfile.TemporaryDirectory(prefix="virtual-")
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._virtual.now

    def close(self) -> None:
        """Close the loop, and remove its sockets."""
        super().close()
        self._folder.cleanup()

    async def create_server(  # type: ignore[override]  # of its many forms the one that servers use here
        self, factory: Any, *args: Any, **more: Any
    ) -> Any:
        """Serve a bound loopback socket's port at a Unix socket of that name."""
        port = more["sock"].getsockname()[1]
        return await self.create_unix_server(factory, self._path(port), backlog=2048)

    async def create_connection(  # type: ignore[override]  # the same of clients
        self, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        """Connect to the Unix socket that stands for a port of loopback."""
        try:
            return await self.create_unix_connection(factory, self._path(port))
        except FileNotFoundError as error:
            raise ConnectionRefusedError(f"nothing listens on port {port}") from error

    def _path(self, port: int) -> str:
        return str(Path(self._folder.name) / str(port))


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
