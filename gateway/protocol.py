"""What an HTTP connection may cost before anybody knows who sends: bytes of a head, and time for it.

uvicorn itself bounds neither, and whoever reaches the port could fill the gateway's memory or its table
of open files without a key. The parser's callbacks and attributes used here are uvicorn's own.
"""

import asyncio
import math
from typing import Any

from uvicorn.protocols.http import httptools_impl

_HEAD_BYTES = 64 * 1024  # of a request line with its headers; proxies in front allow less
_HEAD_S = 30.0
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class Protocol(httptools_impl.HttpToolsProtocol):
    """uvicorn's protocol with both bounds."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unread = 0.0  # bytes since a head or a trailer began; minus infinity within a body
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Tell the request that its client leaves, before the transport refuses to be written to."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end; what it holds is thrown away with the connection."""
        self._unread += len(data)
        super().data_received(data)
        if self._unread > _HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Count a new head from nothing, and start its clock."""
        self._unread = 0.0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Leave the body to who reads it."""
        self._unread = -math.inf
        self._stop_clock()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Count again: behind the last chunk come trailers, which are kept as headers are."""
        self._unread = 0.0

    def on_body(self, body: bytes) -> None:
        """This chunk was not the last one."""
        self._unread = -math.inf
        super().on_body(body)

    def _await_head(self) -> None:
        self._stop_clock()
        self._late = self.loop.call_later(_HEAD_S, self._too_late)

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self.transport.close()
