"""Who waits for a spool's sync under way, and for how long at most. Standard library only.

One sync is under way at a time, and all who come meanwhile wait for it or for the next. A disk that does
not answer (a hung device, a frozen file server) must not keep a gateway's clients for ever: after some ten
seconds nobody waits for it any longer. The sync itself goes on, and nothing is written a second time for it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from scheduler.contracts import errors

LOOK_S = 2.5
HUNG_LOOKS = (
    4  # in a row that see the same sync; counted, as a process that was stopped itself misses some
)
_RETRY_S = 1.0
_log = logging.getLogger(__name__)

Waiter = asyncio.Future[None]
Land = Callable[[BaseException | None], None]
"""Called once when a sync has ended, on its loop; with what it raised."""

Begin = Callable[[asyncio.AbstractEventLoop, Land], Waiter]
"""Begins a sync; its future is done at the latest when `Land` is called."""


class Flights:
    """The syncs of one spool, as those see them who wait.

    Args:
        folder: the spool's, for messages.

    Attributes:
        hung: the sync under way has hung.
    """

    def __init__(self, folder: Path) -> None:
        self.hung = False
        self._folder = folder
        self._flight: Waiter | None = None
        self._waiters: list[Waiter] = []
        self._watching: asyncio.AbstractEventLoop | None = None  # where `_look` comes next

    async def landing(self, begin: Begin) -> None:
        """Return when the sync under way has ended; without one, begin one.

        Raises:
            errors.RecordingUnavailable: it failed, or hangs.
        """
        if self.hung:
            raise self.silent()
        loop = asyncio.get_running_loop()
        if self._flight is None or self._flight.done():
            self._waiters = waiters = list[Waiter]()

            def landed(fault: BaseException | None) -> None:
                if self.hung:
                    self.hung = False
                    _log.warning("usage spool %s: the disk answers again", self._folder)
                for (
                    waiter
                ) in waiters:  # at once: a turn of the loop between would be every request's
                    wake(waiter, fault)

            self._flight = begin(loop, landed)
            if self._watching is not loop:
                self._watching = loop
                loop.call_later(LOOK_S, self._look, None, 0)
        if not self._flight.done():
            mine: Waiter = loop.create_future()
            self._waiters.append(mine)
            await mine

    def silent(self) -> errors.RecordingUnavailable:
        """Return the error of whoever would have to wait for a disk that hangs."""
        return errors.RecordingUnavailable(
            f"usage spool {self._folder}: the disk does not answer: see to it, or set forebay.state_dir "
            "to another disk",
            retry_after_s=_RETRY_S,
        )

    def _look(self, before: Waiter | None, looks: int) -> None:
        flight = self._flight
        if flight is None or flight.done():
            self._watching = None
            return
        looks = looks + 1 if flight is before else 0
        if looks == HUNG_LOOKS:
            self.hung = True
            _log.error("%s", self.silent().message)
            for waiter in self._waiters:
                wake(waiter, self.silent())
        asyncio.get_running_loop().call_later(LOOK_S, self._look, flight, looks)


def wake(waiter: Waiter, fault: BaseException | None = None) -> None:
    """End a wait, unless it has ended."""
    if waiter.done():
        return
    if fault is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(fault)
