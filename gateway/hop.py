"""Connections to replicas: raw asyncio protocols, kept open, watched by one look around for silence.

Knows bytes, frames and time; what a status means, and who is asked, is `replica`'s business.
"""

import asyncio
import collections
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway import hop_reader, vouching
from scheduler.contracts import frames

if TYPE_CHECKING:
    from gateway import hop_pool

_FINISH_S = 1.0  # the end of the body follows the last frame at once; longer is not waited for
_AHEAD_BYTES = 64 * 1024  # received before somebody takes them; more is left in the socket
_RECEIVE_BYTES = 128 * 1024  # in the kernel
_LAG_S = 5.0  # what a trunk has still to bring when the stream's own connection is through
_LAST = (frames.Kind.END, frames.Kind.ERROR)

Take = Callable[[frames.Frame], bool]


class Place(Protocol):
    """One stream's place on a trunk, where its frames come instead of on its own connection."""

    def pause(self) -> None:
        """Let the replica wait: the client is behind."""

    def resume(self) -> None:
        """Let it go on."""

    def leave(self) -> None:
        """Hear no more of it."""


class Broken(Exception):
    """The connection ended, was silent for too long, or said nonsense; the text is one line."""


class Answer:
    """One response as it comes.

    Args:
        connection: where it comes on.

    Attributes:
        connection: the same.
        reader: what is known of it.
        take: takes frames as they come, None while they are kept.
        whole: its last frame has come.
    """

    __slots__ = (
        "_ahead", "_fault", "_ready", "_stopped", "_woken", "connection", "reader", "take", "whole"
    )  # fmt: skip

    def __init__(self, connection: "Connection") -> None:
        self.reader = hop_reader.Reader()
        self.whole = False
        self.connection = connection
        self._ready: collections.deque[frames.Frame] = collections.deque()
        self._ahead = 0
        self.take: Take | None = None
        self._stopped = False
        self._woken: asyncio.Future[None] | None = None
        self._fault: Exception | None = None

    async def head(self) -> hop_reader.Reader:
        """Return what the head says, and the whole text of an answer that is no frames.

        Raises:
            Broken: it is not to be had.
        """
        reader = self.reader
        while not (reader.framed or (reader.status and reader.complete)):
            await self._more()
        return reader

    async def each(self, take: Take) -> frames.Frame | None:
        """Give every frame to ``take``, at once when it comes and without a switch of tasks.

        Args:
            take: is given the frames before the last; False from it ends this call.

        Returns:
            The END or ERROR frame; None after ``take`` said False: call again to go on.

        Raises:
            Broken: the stream broke off.
            Exception: what ``take`` raised.
        """
        ready = self._ready
        while True:
            while ready:
                frame = ready.popleft()
                if frame.kind in _LAST:
                    return frame
                if not take(frame):
                    return None
            self.take = take
            try:
                await self._more()
            finally:
                self.take = None
            if self._stopped:
                self._stopped = False
                return None

    async def _more(self) -> None:
        """Return when something has come that is not taken yet."""
        if self._fault is not None:
            raise self._fault
        self._ahead = 0
        if self.connection.paused:
            self.connection.resume()
        self._woken = self.connection.loop.create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def received(self, data: bytes) -> None:
        """Take bytes from the connection."""
        try:
            found = self.reader.feed(data)
        except (hop_reader.BadResponse, frames.FrameError) as fault:
            self.connection.abort()
            self.broken(Broken(str(fault)))
            return
        if found:
            self._give(found)
        elif self.take is None:
            self._wake()

    def give(self, found: list[frames.Frame]) -> None:
        """Take frames from a trunk."""
        self.reader.framed = True  # whatever comes first, these or the head on its own connection
        self._give(found)

    def _give(self, found: "list[frames.Frame] | tuple[frames.Frame, ...]") -> None:
        try:
            for index, frame in enumerate(found):
                if self.take is None or frame.kind in _LAST:
                    self._keep(found[index:])
                    return
                if not self.take(frame):
                    self.stop()
        except Exception as fault:  # the taker's own: its task shall have it
            self.broken(fault)

    def stop(self) -> None:
        """Hear that the taker is behind: what comes meanwhile is kept, up to a bound."""
        self._stopped = True
        self.take = None
        self._wake()

    def _keep(self, found: "list[frames.Frame] | tuple[frames.Frame, ...]") -> None:
        self.take = None
        for frame in found:
            self._ready.append(frame)
            self._ahead += len(frame.payload) + len(frame.packed)
            if frame.kind in _LAST:
                self.whole = True
        if self._ahead > _AHEAD_BYTES:
            self.connection.pause()
        self._wake()

    def _wake(self) -> None:
        woken = self._woken
        if woken is not None and not woken.done():
            woken.set_result(None)

    def ended(self, fault: BaseException | None) -> None:
        """Hear that the connection is gone; what had come before is still given."""
        self.reader.end()
        if self.connection.place is not None and not self.whole:
            self._lag()
        elif fault is not None:
            self.broken(Broken(hop_reader.words(fault)))
        elif self.reader.status:
            self.broken(Broken("ended without its last frame"))
        else:
            self.broken(Broken("the connection ended"))

    def completed(self) -> None:
        """Hear that its body is whole: without its last frame it has broken off, however cleanly."""
        if not self.reader.framed or self.whole:
            return
        if self.connection.place is not None:
            self._lag()
        else:
            self.broken(Broken("ended without its last frame"))

    def _lag(self) -> None:
        """Give its trunk a moment: what was sent there before may come after the connection's end."""
        self.connection.loop.call_later(_LAG_S, self._late)

    def _late(self) -> None:
        if not self.whole:
            self.broken(Broken("ended without its last frame"))

    def broken(self, fault: Exception) -> None:
        """Let who waits hear that nothing more comes."""
        if self._fault is None:
            self._fault = fault
        self._wake()


class Connection(asyncio.Protocol):
    """One connection to a replica.

    Args:
        pool: where it rests between two requests.
        address: whose it is.

    Attributes:
        heard: when something was heard or sent last, on the loop's clock.
        silence_s: how long the present answer may be silent.
        answer: the present answer, None at rest.
        owner: the replica that answers, and its incarnation.
        place: where the frames of the present answer come, if not here.
        loop: the event loop.
    """

    def __init__(self, pool: "hop_pool.Pool", address: str) -> None:
        self.address = address
        self.heard = 0.0
        self.silence_s = 0.0
        self.answer: Answer | None = None
        self.owner: vouching.Owner | None = None
        self.place: Place | None = None
        self.closed = False
        self.paused = False
        self._pool = pool
        self.loop = asyncio.get_running_loop()  # to ask for it again is a system call each time
        self._time = self.loop.time
        self._left = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvloop's
        """Keep the transport; a replica whose client does not read fills no more than this here."""
        self._transport = transport
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            self._pool.probes.apply(raw)

    def send(self, request: bytes, silence_s: float) -> Answer:
        """Send a request; the answer comes in what is returned."""
        answer = self.expect(silence_s)
        self.write(request)
        return answer

    def expect(self, silence_s: float) -> Answer:
        """Return the answer to the request that is written next."""
        self.answer = answer = Answer(self)
        self.silence_s = silence_s
        self.heard = self._time()
        return answer

    def write(self, request: bytes) -> None:
        """Send a request."""
        if self._transport is not None:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Hand on what has come."""
        answer = self.answer
        if answer is None:
            self.abort()  # nobody asked
            return
        self.heard = self._time()
        answer.received(data)
        if answer.reader.complete:
            if self._left:
                self._rest(answer)
            else:
                answer.completed()

    def eof_received(self) -> None:
        """The replica says no more; the transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the answer."""
        self.closed = True
        self._pool.forget(self)
        if self.answer is not None:
            self.answer.ended(exc)

    def leave(self) -> None:
        """Rest if the answer was read whole, else close.

        A closed connection is how the replica hears that nobody listens any more.
        """
        answer = self.answer
        if answer is None or not answer.whole:
            self.abort()
        elif answer.reader.complete:
            self._rest(answer)
        else:
            self._left, self.silence_s = True, _FINISH_S
            self._settle()

    def _settle(self) -> None:
        """Leave the trunk, and read again if it was told not to."""
        self.resume()
        if self.place is not None:
            self.place.leave()
            self.place = None

    def _rest(self, answer: Answer) -> None:
        self.answer, self._left = None, False
        self.heard = self._time()
        self._settle()
        if answer.reader.keep_alive and not self.closed:
            self._pool.put(self)
        else:
            self.abort()

    def pause(self) -> None:
        """Read nothing more: the client is behind, and its replica shall wait."""
        if self.paused or self.closed or self._transport is None:
            return
        self.paused = True
        if self.place is not None:
            self.place.pause()
        else:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.paused and not self.closed and self._transport is not None:
            self.paused = False
            self.heard = self._time()
            if self.place is not None:
                self.place.resume()
            else:
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        self._pool.forget(self)
        if self.place is not None:
            self.place.leave()
            self.place = None
        if self._transport is not None:
            self._transport.abort()
