"""The replica's end of trunks: what the streams of one gateway worker have to say, sent together.

Knows records and who is behind, not what the frames in them mean (`scheduler.contracts.trunks`).
"""

import asyncio
import collections
import contextlib

from starlette import types

from engines.replica import answers
from scheduler.contracts import frames, trunks

_NAME = trunks.HEADER.encode()
_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", trunks.MEDIA_TYPE.encode()), (b"cache-control", b"no-store")],
}
_SEND_BYTES = 128 * 1024  # of one write, unless a single record has more
_MOST_BYTES = 1024 * 1024  # that wait for a gateway which does not read; then the streams wait
_ID_CHARS = 64


class Trunk:
    """One trunk."""

    def __init__(self) -> None:
        self._parts: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._paused: dict[int, asyncio.Event] = {}
        self._streams: set[int] = set()
        self._said = asyncio.Event()  # there is something to send, or the end has come
        self._room = asyncio.Event()
        self._room.set()
        self._ending = False
        self.closed = False

    def enter(self, number: int) -> "Stream":
        """Return the stream ``number``."""
        self._streams.add(number)
        return Stream(self, number)

    def leave(self, number: int) -> None:
        """Forget a stream that has said everything, or that nobody hears."""
        self._streams.discard(number)
        if (pause := self._paused.pop(number, None)) is not None:
            pause.set()
        if self._ending:
            self._said.set()

    async def put(self, number: int, body: bytes) -> None:
        """Send frames of a stream, once its reader wants more; returns when there is room for the next."""
        while not self.closed and (pause := self._paused.get(number)) is not None:
            await pause.wait()
        if self.closed or number not in self._streams:
            return
        self._parts.append(trunks.RECORD.pack(number, len(body)) + body)
        self._bytes += len(body)
        self._said.set()
        if self._bytes > _MOST_BYTES:
            self._room.clear()
            await self._room.wait()

    def end(self) -> None:
        """End as soon as no stream is left."""
        self._ending = True
        self._said.set()

    async def serve(self, receive: types.Receive, send: types.Send) -> None:
        """Send until the gateway leaves, or until the end."""
        listening = asyncio.create_task(self._listen(receive))
        try:
            await send(_HEAD)
            while not self.closed:
                await self._said.wait()
                await asyncio.sleep(0)  # whoever has a token of the same step says it now
                self._said.clear()
                while self._parts and not self.closed:
                    body = b"".join(self._taken())
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                if self._ending and not self._streams:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
        finally:
            self._close()
            listening.cancel()
            await asyncio.wait({listening})

    def _taken(self) -> list[bytes]:
        taken: list[bytes] = []
        size = 0
        while self._parts and size < _SEND_BYTES:
            part = self._parts.popleft()
            size += len(part)
            self._bytes -= len(part) - trunks.RECORD.size
            taken.append(part)
        if self._bytes <= _MOST_BYTES:
            self._room.set()
        return taken

    async def _listen(self, receive: types.Receive) -> None:
        """Take the gateway's words until it leaves."""
        rest = b""
        with contextlib.suppress(OSError):
            while (message := await receive())["type"] != "http.disconnect":
                rest += message.get("body", b"")
                at = 0
                while len(rest) - at >= trunks.WORD.size:
                    self._hear(*trunks.WORD.unpack_from(rest, at))
                    at += trunks.WORD.size
                rest = rest[at:]
                if not message.get("more_body", False):
                    break
        self._close()

    def _hear(self, word: int, number: int) -> None:
        if word == trunks.PAUSE:
            if number in self._streams:
                self._paused.setdefault(number, asyncio.Event())
        elif (pause := self._paused.pop(number, None)) is not None:
            pause.set()

    def _close(self) -> None:
        self.closed = True
        self._parts.clear()
        self._bytes = 0
        for pause in self._paused.values():
            pause.set()
        self._said.set()
        self._room.set()


class Stream:
    """One stream's way over a trunk."""

    __slots__ = ("_number", "_trunk")

    def __init__(self, trunk: Trunk, number: int) -> None:
        self._trunk = trunk
        self._number = number

    def through(self, send: types.Send) -> types.Send:
        """Return a `send` that lets frames go over the trunk, and all else as before."""
        framed = False

        async def sending(message: types.Message) -> None:
            nonlocal framed
            if message["type"] == "http.response.start":
                framed = (b"content-type", frames.MEDIA_TYPE.encode()) in message["headers"]
            elif framed:
                if body := message.get("body", b""):
                    await self._trunk.put(self._number, body)
                if message.get("more_body", False):
                    return
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return sending

    def leave(self) -> None:
        """Say nothing more."""
        self._trunk.leave(self._number)


class Trunks:
    """The ASGI app of `trunks.PATH`, and where streams find the trunk that they name."""

    def __init__(self) -> None:
        self._open: dict[str, Trunk] = {}
        self._ending = False

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Serve a trunk until one of both ends leaves."""
        name = _named(scope)
        if not name or len(name) > _ID_CHARS or name in self._open or self._ending:
            await answers.send_error(
                send, 400, "bad_request", f"replica: no new trunk of that name: {name[:80]!r}"
            )
            return
        trunk = self._open[name] = Trunk()
        try:
            await trunk.serve(receive, send)
        finally:
            del self._open[name]

    def of(self, scope: types.Scope) -> Stream | None:
        """Return the stream that a request names, if its trunk is here."""
        wanted = trunks.parse(_named(scope))
        trunk = self._open.get(wanted[0]) if wanted is not None else None
        if wanted is None or trunk is None or trunk.closed:
            return None
        return trunk.enter(wanted[1])

    def end(self) -> None:
        """Open none any more, and end those that are here as their streams end: the server stops."""
        self._ending = True
        for trunk in self._open.values():
            trunk.end()


def _named(scope: types.Scope) -> str:
    for name, value in scope["headers"]:
        if name == _NAME:
            return str(value.decode("latin-1"))
    return ""
