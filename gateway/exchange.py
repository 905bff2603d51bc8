"""One request for inference on a client's connection: its body as it comes, and the bytes of its answer.

Stands where uvicorn's request-response cycle would, and has what the protocol uses of one. It knows HTTP and
nothing of what is asked; `hotpath` knows that.
"""

import asyncio
import collections
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from uvicorn.protocols.http import flow_control, httptools_impl

from gateway import bodies, error_map, sse
from scheduler.contracts import errors, frames, ids, quota, requests

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SSE = b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in sse.HEADERS.items())
_CLOSE = b"connection: close\r\n"
_OK = httptools_impl.STATUS_LINE[200]
_NAMED = b"x-forebay-request-id: %b\r\nx-request-id: %b\r\n"
_STREAM = _SSE + _NAMED + b"transfer-encoding: chunked\r\n"
_JSON = _NAMED + b"content-length: %d\r\ncontent-type: application/json\r\n"
_LINE = b"\r\n"
_SIZES = tuple(b"%x\r\n" % size for size in range(2048))  # of chunks, as by far the most have
_UNASKED = 64 * 1024  # bytes of a body that are read before its sender is known


class State(Protocol):
    """What is read of uvicorn's server state."""

    default_headers: list[tuple[bytes, bytes]]


class Connection(Protocol):
    """What is used of the connection that a request came on."""

    transport: asyncio.Transport
    flow: flow_control.FlowControl
    headers: list[tuple[bytes, bytes]]
    expect_100_continue: bool
    server_state: Any

    def end(self) -> None:
        """End the connection: the last answer is written."""

    def on_response_complete(self) -> None:
        """Go on with the connection: the answer is written."""


Serve = Callable[["Exchange"], Coroutine[Any, Any, None]]


class Exchange:
    """A request and its answer.

    Args:
        connection: where it came from.
        serve: answers it, in a task that is cancelled when the client leaves.
        endpoint: what it asks for.
        http10: the client knows no chunks.
        keep_alive: the connection may serve another request.

    Attributes:
        headers: with lower-case names.
        body: what has come of the body.
        more_body: more of it is to come.
        disconnected: the client has left.
        response_complete: the answer is written.
    """

    __slots__ = (
        "_connection",
        "_expects",
        "_flow",
        "_http10",
        "_limit",
        "_limits",
        "_more",
        "_serve",
        "_spoilt",
        "_task",
        "_tasks",
        "body",
        "disconnected",
        "endpoint",
        "headers",
        "keep_alive",
        "more_body",
        "response_complete",
        "transport",
    )

    def __init__(
        self,
        connection: Connection,
        serve: Serve,
        endpoint: requests.Endpoint,
        *,
        http10: bool,
        keep_alive: bool,
    ) -> None:
        self.endpoint = endpoint
        self.headers = connection.headers
        self.transport = connection.transport
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        self.keep_alive = keep_alive
        self._connection = connection
        self._flow = connection.flow
        self._expects = connection.expect_100_continue
        self._http10 = http10
        self._serve = serve
        self._limit = -1  # the body is not wanted yet
        self._limits = b""  # header lines that tell what is left of the caller's quotas
        self._more: asyncio.Future[None] | None = None
        self._spoilt: errors.ForebayError | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def message_event(self) -> "Exchange":
        """What the protocol calls `set` on."""
        return self

    def begin(self, loop: asyncio.AbstractEventLoop, tasks: "set[asyncio.Task[None]]") -> None:
        """Start to answer; the connection's earlier requests have been answered."""
        self._tasks = tasks
        self._task = loop.create_task(self._run())
        tasks.add(self._task)

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except asyncio.CancelledError:
            if not self.disconnected:  # the server stops: nobody else would end the connection
                self.transport.close()
        finally:
            if self._task is not None:
                self._tasks.discard(self._task)

    def feed(self, data: bytes) -> None:
        """Take a piece of the body; what comes after the answer is thrown away."""
        if self.response_complete:
            return
        self.body += data
        if self._limit < 0:
            if len(self.body) > _UNASKED:
                self._flow.pause_reading()
        elif len(self.body) > self._limit:
            self.set()

    def set(self) -> None:
        """Hear from the protocol that the body is whole, or that the client has left."""
        if self.disconnected:
            if self._task is not None and not self.response_complete:
                self._task.cancel()
        elif self._more is not None and not self._more.done():
            self._more.set_result(None)

    def spoil(self, error: errors.ForebayError) -> None:
        """Hear that the rest of the body will not come, and why; the answer ends the connection."""
        self.keep_alive = False
        self._spoilt = error
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def header(self, name: bytes) -> str | None:
        """Return a header's value, the last one of several."""
        for key, value in reversed(self.headers):
            if key == name:
                return value.decode("latin-1")
        return None

    async def read(self, limit: int, room: bodies.Bodies) -> bytes:
        """Return the whole body.

        Args:
            limit: the most bytes that it may have; not one more is kept.
            room: for it, among others.

        Raises:
            errors.BodyTooLarge: it has more.
            errors.Busy: there is no room for it now.
            errors.ForebayError: it broke off, or came too slowly.
        """
        if self.more_body:
            length = self.header(b"content-length") or ""
            if length.isdigit() and int(length) > limit:
                raise _too_large(limit)
            with room.reading() as part:
                await self._come(limit, part)
        self._flow.resume_reading()  # a body that was whole before it was asked for may have stopped it
        if len(self.body) > limit:
            self.body = bytearray()
            raise _too_large(limit)
        return bytes(self.body)

    async def _come(self, limit: int, part: bodies.Reading) -> None:
        """Return when the body is whole, or larger than ``limit``."""
        self._limit = min(limit, part.hold(len(self.body)))
        if self._expects:
            self._expects = False
            self.transport.write(_CONTINUE)
        while self.more_body and len(self.body) <= limit:
            if self._spoilt is not None:
                raise self._spoilt
            self._limit = min(limit, part.hold(len(self.body)))
            self._flow.resume_reading()
            self._more = asyncio.get_running_loop().create_future()
            await self._more

    def outlet(self, request: requests.InferenceRequest) -> "Stream | Whole":
        """Return where the answer to ``request`` goes."""
        kind = Stream if request.stream else Whole
        return kind(self, request.request_id)

    def write(self, data: bytes) -> bool:
        """Write to the client; False: it is behind."""
        if self.disconnected:
            return True
        self.transport.write(data)
        return not self._flow.write_paused

    async def drained(self) -> None:
        """Return once the client has read enough."""
        await self._flow.drain()

    def head(self, status: bytes, headers: bytes) -> bytes:
        """Return a response's head, the blank line included."""
        parts = [status]
        for name, value in self._connection.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        parts += (headers, self._limits)
        if self._expects and self.more_body:
            self.keep_alive = False  # what comes next may be the body, or may not
        if not self.keep_alive:
            parts.append(_CLOSE)
        parts.append(b"\r\n")
        return b"".join(parts)

    def quotas(self, told: quota.Headers) -> None:
        """Tell what is left of the caller's quotas in the answer's head."""
        self._limits = b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in told)

    def stream_head(self, request_id: str) -> bytes:
        """Return the head of a stream."""
        named = request_id.encode()
        if self._http10:
            self.keep_alive = False  # its end is the connection's end
            return self.head(_OK, _SSE + _NAMED % (named, named))
        return self.head(_OK, _STREAM % (named, named))

    def chunk(self, data: bytes) -> bytes:
        """Return ``data`` as a piece of a stream."""
        return data if self._http10 else b"%x\r\n%b\r\n" % (len(data), data)

    def end(self, last: bytes = b"") -> None:
        """End a stream."""
        self._finish(last if self._http10 else last + b"0\r\n\r\n")

    def answer(self, body: bytes, request_id: str) -> None:
        """Answer with a JSON body."""
        named = request_id.encode()
        self._finish(self.head(_OK, _JSON % (named, named, len(body))) + body)

    def refuse(self, error: errors.ForebayError, request_id: str = "") -> None:
        """Answer with an error."""
        body = error_map.body(error)
        headers = error_map.headers(error)
        headers |= error_map.named(request_id or ids.uuid7())
        if isinstance(error, errors.Unauthenticated):
            headers["www-authenticate"] = "Bearer"
        headers |= {"content-length": str(len(body)), "content-type": "application/json"}
        lines = b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in headers.items())
        self._finish(self.head(httptools_impl.STATUS_LINE[error.status], lines) + body)

    def _finish(self, data: bytes) -> None:
        if self.disconnected or self.response_complete:
            return
        self.response_complete = True
        self.body = bytearray()
        if data:
            self.transport.write(data)
        if not self.keep_alive:
            self._connection.end()
        self._connection.on_response_complete()


class Stream:
    """Sends SSE bytes as they come; the status line goes out with the first of them."""

    __slots__ = ("_chunked", "_exchange", "_flow", "_request_id", "_write", "begun")

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        self._exchange = exchange
        self._request_id = request_id
        self._chunked = not exchange._http10
        self._flow = exchange._flow
        self._write = exchange.transport.write
        self.begun = False

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Its client did not ask for the prompt's ids."""

    def data(self, frame: frames.Frame) -> bool:
        """Send a frame's bytes; False: the client is behind."""
        payload = frame.payload
        exchange = self._exchange
        if not payload:
            return True
        if self.begun:  # written out, as it is done for every token
            if exchange.disconnected:
                return True
            if self._chunked:
                size = len(payload)
                head = _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
                payload = head + payload + _LINE
            self._write(payload)
            return not self._flow.write_paused
        self.begun = True
        return exchange.write(exchange.stream_head(self._request_id) + exchange.chunk(payload))

    def quotas(self, told: quota.Headers) -> None:
        """Tell what is left of the caller's quotas."""
        self._exchange.quotas(told)

    async def drained(self) -> None:
        """Return once the client has read enough."""
        await self._exchange.drained()

    def restart(self) -> None:
        """Nothing is collected here."""

    def finish(self) -> None:
        """End a whole answer."""
        head = b"" if self.begun else self._exchange.stream_head(self._request_id)
        self._exchange.end(head)

    def fail(self, error: errors.ForebayError) -> None:
        """End an answer with an error."""
        if self.begun:
            self._exchange.end(
                self._exchange.chunk(sse.error_event(error, self._exchange.endpoint))
            )
        else:
            self._exchange.refuse(error, self._request_id)


class Whole:
    """Collects an answer that is not streamed; nothing is sent before it is complete."""

    __slots__ = ("_exchange", "_parts", "_request_id")
    begun = False

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        self._exchange = exchange
        self._request_id = request_id
        self._parts: collections.deque[bytes] = collections.deque()

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Its client did not ask for the prompt's ids."""

    def data(self, frame: frames.Frame) -> bool:
        """Keep a frame's bytes."""
        self._parts.append(frame.payload)
        return True

    def quotas(self, told: quota.Headers) -> None:
        """Tell what is left of the caller's quotas."""
        self._exchange.quotas(told)

    async def drained(self) -> None:
        """Memory is never behind."""

    def restart(self) -> None:
        """Forget what a lost replica said."""
        self._parts.clear()

    def finish(self) -> None:
        """Send the answer."""
        self._exchange.answer(b"".join(self._parts), self._request_id)

    def fail(self, error: errors.ForebayError) -> None:
        """Send an error in its place."""
        self._exchange.refuse(error, self._request_id)


def _too_large(limit: int) -> errors.BodyTooLarge:
    return errors.BodyTooLarge(f"body: larger than the limit of {limit} bytes; send less at once")
