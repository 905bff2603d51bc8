"""One HTTP connection of a client: bounds before anybody knows who sends, and the hot routes by hand.

uvicorn's protocol parses and keeps what comes in order; requests for inference leave it at the end of their
head for an `exchange.Exchange`, which answers without ASGI's dictionaries and awaits. Every other request
on the same connection goes to the application as uvicorn does it. The parser's callbacks and attributes
used here are uvicorn's own.

A head is bounded in bytes and time, a connection without a request in time. One look around for all
connections (`sweep`) does for what would else be two timers a request.
"""

import asyncio
import contextlib
import math
import urllib.parse
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn.protocols.http import httptools_impl

from gateway import exchange, hotpath

SWEEP_S = 0.25
_HEAD_BYTES = 64 * 1024  # of a request line with its headers; proxies in front allow less
_HEAD_S = 30.0
_KEEP_ALIVE_S = 75.0  # longer than the idle time of usual clients and proxies
_PIPELINED = 16  # requests ahead of the one that is answered from which no more is read
_MOST_PIPELINED = 256  # what one more read may bring; nobody honest sends more before an answer
_OFFER = frozenset({b"connection", b"upgrade", b"http2-settings"})
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class Protocol(httptools_impl.HttpToolsProtocol):
    """uvicorn's protocol with bounds and the hot routes.

    Args:
        hot: answers requests for inference.
        args: uvicorn's own.
        more: uvicorn's own.
    """

    def __init__(self, hot: hotpath.HotPath, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._hot = hot
        self._unread = 0.0  # bytes since a head or a trailer began; minus infinity within a body
        self._until = math.inf  # when it is closed if nothing happens, on the loop's clock
        self._running: Any = None  # the request that is being answered; `cycle` is the newest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._until = self.loop.time() + _HEAD_S

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request under way: uvicorn tells the newest of a pipeline alone."""
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Tell the requests that their client leaves, before the transport refuses to be written to."""
        self._leave()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end; what it holds is thrown away with the connection."""
        self._unread += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._unread > _HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _feed(self, data: bytes) -> bytes:
        """Parse; returns what is to be parsed again.

        A client that offers an upgrade along with a request (Java's own does, to HTTP/2) means the request
        where nobody takes the offer. The parser stops there, so it is given the head without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("no proxy") from None
            head = [
                b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
            ]
            head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in _OFFER]
            self.parser = httptools.HttpRequestParser(self)
            return b"".join([*head, b"\r\n", data[offer.args[0] :]])
        return b""

    def on_message_begin(self) -> None:
        """Count a new head from nothing, and start its clock."""
        self._unread = 0.0
        self._until = self.loop.time() + _HEAD_S
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Leave the body to who reads it, and hot requests to the hot path."""
        self._unread = -math.inf
        self._until = math.inf
        if self.parser.should_upgrade():
            return  # it comes again without the offer
        if self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        path = self.url.partition(b"?")[0]
        if b"%" in path:
            path = urllib.parse.unquote_to_bytes(path)
        endpoint = hotpath.ENDPOINTS.get(path)
        if endpoint is None:
            super().on_headers_complete()
            return
        version = self.parser.get_http_version()
        before = self.cycle
        fresh = exchange.Exchange(
            self,
            self._hot.serve,
            endpoint,
            http10=version == "1.0",
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
        )
        self.cycle = fresh  # type: ignore[assignment]  # it has what is used of a cycle
        if before is None or before.response_complete:
            self._start_asgi_task(fresh, self.app)
        else:
            self.pipeline.appendleft((fresh, self.app))  # type: ignore[arg-type]  # the same
            if len(self.pipeline) >= _PIPELINED:
                self.flow.pause_reading()
            if len(self.pipeline) > _MOST_PIPELINED:
                self.transport.abort()

    def on_chunk_header(self) -> None:
        """Count again: behind the last chunk come trailers, which are kept as headers are."""
        self._unread = 0.0

    def on_body(self, body: bytes) -> None:
        """This chunk was not the last one."""
        self._unread = -math.inf
        if isinstance(self.cycle, exchange.Exchange):
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request of a pipeline, or let the connection rest."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if len(self.pipeline) < _PIPELINED:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._until == math.inf:
            self._until = self.loop.time() + _KEEP_ALIVE_S

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if isinstance(cycle, exchange.Exchange):
            cycle.begin(self.loop, self.tasks)
        else:
            super()._start_asgi_task(cycle, app)

    def _leave(self) -> None:
        """Tell the request under way that its client leaves, and the newest one."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete and not cycle.disconnected:
                cycle.disconnected = True
                cycle.message_event.set()

    def rest(self, now: float) -> None:
        """Close if nothing has happened for too long; never under an answer."""
        if now < self._until or self.transport.is_closing():
            return
        if self._running is None or self._running.response_complete:
            self.transport.close()


async def sweep(connections: Iterable[Any]) -> None:
    """Close connections that rest for too long, until cancelled.

    Args:
        connections: uvicorn's own set of them.
    """
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_S)
        now = loop.time()
        for connection in list(connections):
            with contextlib.suppress(AttributeError):
                connection.rest(now)
