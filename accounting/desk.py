"""How many reports are made at once: a heavy one must not take the service that makes it from everybody.

A report runs in a thread with DuckDB's memory and two of its threads; requests are streamed by the same
process. Everybody has a few places of their own, so that one person's reports wait behind each other and not
before those of others.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Hashable

from scheduler.contracts import errors

_WAITING_AT_MOST = 100


@dataclasses.dataclass(slots=True)
class _Own:
    """One caller's places, and how many of their reports run or wait."""

    places: asyncio.Semaphore
    open: int = 0


class Desk:
    """Gives places; of one event loop.

    Args:
        at_once: reports under way in this process.
        each: of these, of one caller.
        wait_s: how long a report waits for a place.
    """

    def __init__(self, at_once: int, each: int, wait_s: float) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._each = each
        self._wait_s = wait_s
        self._own: dict[Hashable, _Own] = {}
        self._open = 0
        self._most = at_once + _WAITING_AT_MOST

    @contextlib.asynccontextmanager
    async def place(self, who: Hashable) -> AsyncIterator[None]:
        """Wait for a place of ``who`` and hold it.

        Raises:
            errors.Busy: there is none in time.
        """
        if self._open >= self._most:
            raise self._busy("too many reports wait here")
        own = self._own.setdefault(who, _Own(asyncio.Semaphore(self._each)))
        own.open += 1
        self._open += 1
        try:
            async with contextlib.AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(self._wait_s):
                        await held.enter_async_context(own.places)
                        await held.enter_async_context(self._places)
                except TimeoutError:
                    mine = own.open > self._each
                    raise self._busy(
                        f"{self._each} of your reports are under way"
                        if mine
                        else "others' reports are under way"
                    ) from None
                yield
        finally:
            self._open -= 1
            own.open -= 1
            if not own.open:
                del self._own[who]

    def _busy(self, why: str) -> errors.Busy:
        return errors.Busy(
            f"{why}: ask again in a minute, or for a shorter window or fewer teams",
            retry_after_s=max(1.0, self._wait_s),
        )
