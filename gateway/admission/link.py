"""One connection between a worker and an owner of queues: frames in, frames out, and its end."""

import asyncio
import logging
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from gateway.admission import messages

Word = TypeVar("Word")
BEAT_S = 2.0
MISSED = 4  # beats in a row: of a host that lost its power comes nothing, not even an end
_BEAT = messages.Beat()
_log = logging.getLogger(__name__)


class Link(asyncio.Protocol, Generic[Word]):
    """A connection; what is said within one turn of the event loop leaves in one write.

    Args:
        decoder: of what the other side says.
        heard: called with each message; an error of it ends the link.
        lost: called once when the connection has ended.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Word]",
        heard: Callable[["Link[Word]", Word], None],
        lost: Callable[["Link[Word]"], None],
    ) -> None:
        self._decoder = decoder
        self._heard = heard
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._in = bytearray()
        self._out: list[bytes] = []
        self._silent = 0  # beats since something was heard
        self._timer: asyncio.TimerHandle | None = None
        self.peer = ""

    @property
    def open(self) -> bool:
        """Whether the other side can still be told something."""
        return self._transport is not None and not self._transport.is_closing()

    def say(self, message: messages.Message) -> None:
        """Send a message; it is lost in silence if the connection is lost."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(messages.encode(message))

    def close(self) -> None:
        """End the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = typing.cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._timer = self._loop.call_later(BEAT_S, self.beat)
        self._flush()

    def beat(self) -> None:
        """Say that this side lives; end a link on which nothing was heard for several beats.

        Beats are counted, not seconds: a process that was stopped itself has missed one.
        """
        if self._transport is None or self._transport.is_closing():
            return
        self._silent += 1
        if self._silent > MISSED:
            _log.warning("admission link to %s: nothing heard, it ends", self.peer or "?")
            self.abort()
            return
        self.say(_BEAT)
        self._timer = self._loop.call_later(BEAT_S, self.beat)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner of the link."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        """Hand over every whole message."""
        self._silent = 0
        buffer = self._in
        buffer += data
        start, size = 0, len(buffer)
        head = messages.LENGTH.size
        try:
            while size - start >= head:
                (length,) = messages.LENGTH.unpack_from(buffer, start)
                if length > messages.MOST_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                end = start + head + length
                if end > size:
                    break
                message = self._decoder.decode(memoryview(buffer)[start + head : end])
                start = end
                if type(message) is not messages.Beat:
                    self._heard(self, message)
        except Exception as error:
            # A side that does not speak the language, or a fault of ours: begin anew either way.
            _log.exception("admission link to %s ends: %s", self.peer or "?", error)
            self.abort()
            return
        if start:
            del buffer[:start]

    def abort(self) -> None:
        """End the connection at once."""
        self._out.clear()
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        if self._transport is None:
            return  # not yet: `connection_made` sends it
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            self._transport.write(b"".join(out))


AnyLink = Link[Any]
