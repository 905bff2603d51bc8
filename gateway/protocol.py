"""One HTTP connection of a client: bounds before anybody knows who sends, and the hot routes by hand.

uvicorn's protocol parses and keeps what comes in order; requests for inference leave it at the end of their
head for an `exchange.Exchange`, which answers without ASGI's dictionaries and awaits. Every other request
on the same connection goes to the application as uvicorn does it. The parser's callbacks and attributes
used here are uvicorn's own.

A head is bounded in bytes and time, a body in time, a connection without a request in time, and
connections in number. One look around for all connections (`sweep`) does for what would else be timers of
every request. What ends a connection is never written into an answer that runs: it ends after it.
"""

import asyncio
import logging
import math
import urllib.parse
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn.protocols.http import httptools_impl

from gateway import exchange, heads, hotpath
from scheduler.contracts import errors

SWEEP_S = 0.25
_log = logging.getLogger(__name__)
_LINGER_S = 1.0
_FLOOD_BYTES = 1024 * 1024  # thrown away behind a last answer; who sends more does not wait for it
_HEAD_BYTES = 64 * 1024  # of a request line with its headers; proxies in front allow less
_PIPELINED = 16  # requests ahead of the one that is answered from which no more is read
_MOST_PIPELINED = 256  # what one more read may bring; nobody honest sends more before an answer
_OFFER = frozenset({b"connection", b"upgrade", b"http2-settings"})


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
        self._large = False  # one read may hold more than a head may have
        self._until = math.inf  # when it is closed if nothing happens, on the loop's clock
        self._body_from = math.inf  # since when a body comes, less the time that it was not wanted
        self._body_bytes = 0
        self._looked = self.loop.time()  # when `rest` was last asked
        self._heading = False  # within a head
        self._lingering = False  # all is said; the client is given a moment to hear it
        self._deaf = False  # what comes is thrown away: its last answer ends the connection
        self._running: Any = None  # the request that is being answered; `cycle` is the newest
        self._unheard = (
            0  # bytes that were written and that the client had not read at the last look
        )
        self._unheard_since = self._looked

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the clock of the first head, if there is room for one more connection."""
        super().connection_made(transport)
        self._until = self.loop.time() + self._hot.limits.head_timeout_s
        full = self._hot.doors.enter(self.client)
        if full is not None:
            self._give_up(full)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request under way: uvicorn tells the newest of a pipeline alone."""
        self._leave()
        self._hot.doors.leave(self.client)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Tell the requests that their client leaves, before the transport refuses to be written to."""
        self._leave()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end; what it holds is thrown away with the connection."""
        self._unread += len(data)
        self._large = len(data) > _HEAD_BYTES
        if self._deaf:
            if self._unread > _FLOOD_BYTES:
                self.transport.abort()
            return
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError as fault:
            self._give_up(heads.reason(fault))
        if self._unread > _HEAD_BYTES and not self._deaf:
            self._give_up(heads.too_large())

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
        self._heading = True
        self._until = self.loop.time() + self._hot.limits.head_timeout_s
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Leave the body to who reads it, and hot requests to the hot path."""
        self._heading = False
        large = self._large or self._unread > _HEAD_BYTES  # or its body has come along
        self._unread = -math.inf
        self._body_from = self._until - self._hot.limits.head_timeout_s
        self._body_bytes = 0
        self._until = math.inf
        if self.parser.should_upgrade():
            return  # it comes again without the offer
        if len(self.pipeline) >= _MOST_PIPELINED:
            self.transport.abort()
            raise httptools.HttpParserError("more requests than anybody sends ahead")
        version = self.parser.get_http_version()
        heads.check(version, self.headers)
        if large:
            heads.bounded(self.url, self.headers, _HEAD_BYTES)
        if version == "1.0":
            self.expect_100_continue = False  # it would take that for the answer (RFC 9110, 10.1.1)
        method = self.parser.get_method()
        endpoint = hotpath.ENDPOINTS.get(self.url) if method == b"POST" else None
        if endpoint is None:
            self.url = heads.origin_form(method, self.url)
            path = self.url.partition(b"?")[0]
            if b"%" in path:
                path = urllib.parse.unquote_to_bytes(path)
            endpoint = hotpath.ENDPOINTS.get(path) if method == b"POST" else None
        if endpoint is None:
            super().on_headers_complete()
            self.cycle.transport = _Outward(self)  # type: ignore[assignment]  # what is used of one
            return
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

    def on_chunk_header(self) -> None:
        """Count again: behind the last chunk come trailers, which are no headers of the request."""
        self._unread = 0.0
        self.headers = []  # whoever answers has the list of the head

    def on_body(self, body: bytes) -> None:
        """This chunk was not the last one."""
        self._unread = -math.inf
        self._body_bytes += len(body)
        if isinstance(self.cycle, exchange.Exchange):
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._body_from = math.inf
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
            self._until = self.loop.time() + self._hot.limits.idle_timeout_s

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
        """Close if nothing has happened for too long; never under an answer, unless nobody reads it."""
        since, self._looked = now - self._looked, now
        unheard = self.transport.get_write_buffer_size()
        if not unheard or unheard != self._unheard:
            self._unheard, self._unheard_since = unheard, now
        if now - self._unheard_since > self._hot.limits.client_stall_s:
            self.transport.abort()  # closed, it would wait for its client for ever
            return
        if self.transport.is_closing():
            return
        if self._lingering:
            if now >= self._until:
                self.transport.close()
        elif self._body_from != math.inf:
            limits = self._hot.limits
            if self.flow.read_paused or self.cycle is not self._running:
                self._body_from += since  # it is we who are late
            elif (now - self._body_from - self._body_bytes / limits.body_bytes_per_s) > (
                limits.body_timeout_s
            ):
                self._give_up(heads.late_body())
        elif now >= self._until and (self._running is None or self._running.response_complete):
            if self._heading:
                self._give_up(heads.late_head())
            else:
                self.transport.close()

    def _give_up(self, error: errors.ForebayError) -> None:
        """Hear nothing more; requests that are whole are answered, and ``error`` is told where it fits.

        Never inside another answer: a client would take it for a part of that.
        """
        self._deaf, self._unread, self._body_from = True, 0.0, math.inf
        newest = self.cycle
        if newest is None or newest.response_complete:
            self._say(error)
        elif not newest.more_body:
            newest.keep_alive = False
        elif newest is not self._running:
            self.pipeline.popleft()
            before = self.pipeline[0][0] if self.pipeline else self._running
            self.cycle = before
            before.keep_alive = False
        elif isinstance(newest, exchange.Exchange):
            newest.spoil(error)
        else:
            begun = newest.response_started
            newest.disconnected = True
            newest.message_event.set()
            if begun:
                self.transport.close()
            else:
                self._say(error)

    def end(self) -> None:
        """Close when all is written; a client that still sends is given a moment to hear it.

        Closed with bytes unread, TCP would throw away what was just said. Of a body that was refused before
        it was whole the rest is taken and thrown away: many clients read nothing before they have sent it.
        """
        self.pipeline.clear()  # what came behind the last one is not answered
        linger_s = _LINGER_S
        if self._body_from != math.inf:
            self._deaf, self._unread, self._body_from = True, -math.inf, math.inf
            linger_s = self._hot.limits.body_timeout_s
        if not self._deaf or self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingering, self._until = True, self.loop.time() + linger_s
        self.transport.write_eof()

    def _say(self, error: errors.ForebayError) -> None:
        """Write an error where no answer runs, and close."""
        if not self.transport.is_closing():
            self.transport.write(heads.refusal(error, self.server_state.default_headers))
            self.end()


class _Outward:
    """What uvicorn's cycle does with its connection: it ends it as an `exchange.Exchange` does."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: Protocol) -> None:
        transport = connection.transport
        self.write, self.is_closing = transport.write, transport.is_closing
        self.close = connection.end


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
            try:
                connection.rest(now)
            except Exception:
                # One that can't be looked at must not keep the others open for ever.
                _log.exception("a connection could not be looked at: it ends")
                connection.transport.abort()
