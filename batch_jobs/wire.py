"""HTTP/1.1 to the gateway as the batch runner needs it: kept connections, one request at a time on each.

A general client costs ten times what is done here for a line: of an answer only the status, four headers and
the body are looked at. Knows bytes, frames and time; what an answer means is `verdicts`' business.
"""

import asyncio
import collections
import contextlib
import ssl
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import httptools
import msgspec

from batch_jobs import verdicts
from scheduler.contracts import frames

_IDLE_S = (
    15.0  # far below the gateway's own patience, so that it never closes one as it is used again
)
_MOST_BYTES = 2 * frames.MAX_FRAME_BYTES  # of an answer
_FRAMES = frames.MEDIA_TYPE.encode()
_REQUEST_ID = b"x-forebay-request-id"
_VERSION = b"x-forebay-version"
_RETRY_AFTER = b"retry-after"
_CONTENT_TYPE = b"content-type"
_KNOWN = frozenset({_REQUEST_ID, _VERSION, _RETRY_AFTER, _CONTENT_TYPE})

Heard = Callable[[frames.Frame, str], None]
"""Called with each frame of ids of an answer under way, and the version that they belong to."""


class _Said(Exception):
    """The answer can't be read any further: it is as good as cut."""


class Connection(asyncio.Protocol):
    """One connection to the gateway; the names of the parser's callbacks are httptools'.

    Args:
        pool: where it rests between two requests.
    """

    def __init__(self, pool: "Pool") -> None:
        self.rested = 0.0  # when it was put back, on the loop's clock
        self._pool = pool
        self._transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._future: asyncio.Future[verdicts.Answer] | None = None
        self._heard: Heard | None = None
        self._clear()

    def _clear(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._decoder: frames.Decoder | None = None
        self._version = ""
        self._answer: verdicts.Answer | None = None  # framed ones: its last frame has come

    def send(self, request: Sequence[bytes], heard: Heard) -> "asyncio.Future[verdicts.Answer]":
        """Send a request; its answer is what the future comes to, whatever goes wrong."""
        self._heard = heard
        self._future = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        return self._future

    @property
    def closing(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self._transport.is_closing())

    def abort(self) -> None:
        """Close at once, which is how the gateway hears that nobody waits any more."""
        self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        if self._future is None:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(self._answer or verdicts.Answer(verdicts.CUT))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits."""
        self._pool.forget(self)
        self._end(self._answer or self._cut())

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """Refuse what nobody asked for: it would be taken for the next answer."""
        if self._future is None:
            raise _Said

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep those that say something to us."""
        name = name.lower()
        if name in _KNOWN:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """See what the body is."""
        if self._headers.get(_CONTENT_TYPE, b"").partition(b";")[0].strip() == _FRAMES:
            self._decoder = frames.Decoder()
            self._version = self._headers.get(_VERSION, b"").decode("latin-1")

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._size += len(data)
        if self._size > _MOST_BYTES:
            raise _Said
        if self._decoder is None:
            self._body.append(data)
            return
        for frame in self._decoder.feed(data):
            self._frame(frame)

    def on_message_complete(self) -> None:
        """Give the answer."""
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # what comes before an answer
            self._clear()
            return
        if self._decoder is None:
            headers = self._headers
            answer = verdicts.Answer(
                status,
                b"".join(self._body),
                headers.get(_REQUEST_ID, b"").decode("latin-1"),
                _seconds(headers.get(_RETRY_AFTER, b"")),
            )
        else:
            answer = self._answer or self._cut()
        rests = self._future is not None and self._parser.should_keep_alive()
        self._end(answer)
        if rests:
            self._pool.put(self)
        else:
            self.abort()

    def _frame(self, frame: frames.Frame) -> None:
        """Take one frame of an answer; see the gateway's `line_outlet`."""
        if frame.kind is frames.Kind.END:
            self._answer = verdicts.Answer(200, b"".join(self._body), self._request_id())
        elif frame.kind is frames.Kind.ERROR:
            said = msgspec.json.decode(frame.payload)
            self._answer = verdicts.Answer(
                int(said["status"]), frame.payload, self._request_id(), float(said["retry_after_s"])
            )
        elif frame.kind is frames.Kind.DATA and frame.payload:
            self._body.append(frame.payload)
        elif self._heard is not None:
            try:
                self._heard(frame, self._version)
            except Exception as fault:  # the hearer's own: its task shall have it
                self._fail(fault)

    def _request_id(self) -> str:
        return self._headers.get(_REQUEST_ID, b"").decode("latin-1")

    def _cut(self) -> verdicts.Answer:
        return verdicts.Answer(verdicts.CUT, request_id=self._request_id())

    def _fail(self, fault: Exception) -> None:
        self._heard = None
        if self._future is not None and not self._future.done():
            self._future.set_exception(fault)
        self.abort()

    def _end(self, answer: verdicts.Answer) -> None:
        future, self._future, self._heard = self._future, None, None
        self._clear()
        if future is not None and not future.done():
            future.set_result(answer)


class Pool:
    """Connections to one gateway, kept open between requests. Closed by `close`.

    Args:
        url: base URL, http or https.
        connect_s: time to connect, in seconds.

    Attributes:
        host: what a request's Host header says.
        path: what comes before a request's own path.
    """

    def __init__(self, url: str, connect_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https address")
        self.host = parts.netloc.rpartition("@")[2]
        self.path = parts.path.rstrip("/")
        self._name = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._idle: collections.deque[Connection] = collections.deque()
        self._all: set[Connection] = set()

    async def get(self) -> Connection:
        """Return a connection that nobody uses.

        Raises:
            OSError: the gateway can't be reached; `TimeoutError` among them.
        """
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].rested > _IDLE_S:
            self._idle.popleft().abort()
        while self._idle:
            found = self._idle.pop()
            if not found.closing:
                return found
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, made = await loop.create_connection(
                lambda: Connection(self), self._name, self._port, ssl=self._ssl
            )
        self._all.add(made)
        return made

    def put(self, connection: Connection) -> None:
        """Let a connection rest."""
        connection.rested = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is gone."""
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.abort()


def _seconds(text: bytes) -> float:
    try:
        return max(0.0, min(float(text), 86_400.0))
    except ValueError:
        return 0.0
