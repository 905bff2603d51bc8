"""The client end of a control link: one bidirectional call kept open, whole states both ways.

Reports go out when something has changed, at most every `Pace.quick_s`, and as a heartbeat otherwise.
When the call breaks, the address is read anew and the call made again, for ever: nobody at the other
end means that things go on as they were last told to. A peer that was replaced is left at once, though
the call to it still stands: one that is stopped or cut off would keep it until TCP gives up.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from scheduler.contracts import wire

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_log = logging.getLogger(__name__)
Out = TypeVar("Out")
In = TypeVar("In")


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How often reports go out: between two changes, and when nothing changes."""

    quick_s: float = 0.2
    heartbeat_s: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ends(Generic[Out, In]):
    """What the link moves.

    Attributes:
        where: the peer's ``host:port`` now, or None if nobody knows.
        open_call: opens the call on a channel: the stub's method.
        report: makes the newest report.
        take: takes a desired state.
    """

    where: Callable[[], str | None]
    open_call: Callable[[grpc.aio.Channel], Callable[..., Any]]
    report: Callable[[], Out]
    take: Callable[[In], None]


class Link(Generic[Out, In]):
    """Keeps the call open while `run` runs.

    Args:
        ends: what it moves.
        token: the bearer token.
        pace: how often.
        name: for the log.
    """

    def __init__(self, ends: Ends[Out, In], token: str, pace: Pace, name: str) -> None:
        self._ends = ends
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._pace = pace
        self._name = name
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()
        self._leaving = False
        self._last_said = False  # in this call
        self._last_taken = asyncio.Event()
        self.connected = False
        self.lost_at: float | None = None

    def changed(self, *, urgent: bool = False) -> None:
        """Say that the report is another one now; an urgent one does not wait for its turn."""
        self._dirty.set()
        if urgent:
            self._urgent.set()

    async def farewell(self, timeout_s: float) -> bool:
        """Send the newest report as the last one; returns whether the peer took it in time.

        A report that was only written may still be lost with the process that wrote it, and the peer then
        sees an end without a reason. So the call is half-closed after it and the peer's own end of the
        call, which comes after it has read everything, is waited for.
        """
        self._leaving = True
        self.changed(urgent=True)
        try:
            await asyncio.wait_for(self._last_taken.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Stay connected until cancelled, or until the peer has taken the farewell."""
        pause = FIRST_PAUSE_S
        self.lost_at = asyncio.get_running_loop().time()
        while not self._last_taken.is_set():
            address = self._ends.where()
            if address is not None and await self._converse(address):
                pause = FIRST_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_S, pause * 2)

    async def _converse(self, address: str) -> bool:
        """Hold one call until it breaks; returns whether the peer ever answered."""
        heard = self._last_said = False
        channel = grpc.aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        call = self._ends.open_call(channel)(self._reports(), metadata=self._metadata)
        watch = asyncio.create_task(self._leave_when_replaced(address, call))
        try:
            async for message in call:
                if not heard:
                    _log.info("%s: connected to %s", self._name, address)
                heard = self.connected = True
                self.lost_at = None
                try:
                    self._ends.take(message)
                except ValueError:
                    _log.exception("%s: desired state ignored", self._name)
            if self._last_said:
                self._last_taken.set()
                return heard
            _log.info("%s: %s ended the call", self._name, address)
        except grpc.aio.AioRpcError as error:
            _log.info("%s: %s: %s", self._name, address, error.details())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is we who are to end, not the call
        finally:
            watch.cancel()
            await asyncio.wait({watch})
            if self.connected or self.lost_at is None:
                self.lost_at = asyncio.get_running_loop().time()
            self.connected = False
            await channel.close()
        return heard

    async def _leave_when_replaced(self, address: str, call: Any) -> None:
        """End the call once the peer is said to be elsewhere."""
        while self._ends.where() in {None, address}:  # noqa: ASYNC110 - a file rings no bell
            await asyncio.sleep(self._pace.heartbeat_s)
        _log.info("%s: %s was replaced", self._name, address)
        call.cancel()

    async def _reports(self) -> AsyncIterator[Out]:
        while True:
            self._dirty.clear()
            self._urgent.clear()
            last = self._leaving
            yield self._ends.report()
            if last:
                self._last_said = True
                return
            await _wait(self._urgent, self._pace.quick_s)
            if not self._dirty.is_set():
                await _wait(self._dirty, self._pace.heartbeat_s - self._pace.quick_s)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), max(0.0, seconds))
    except TimeoutError:
        return
