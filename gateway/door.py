"""The ASGI middleware before every route of the application: who asks, and how much they may send.

Plain ASGI on purpose: middleware that wraps the response in a task of its own hides from the routes
that the client has left.
"""

from starlette import types

from gateway import bodies, error_map, settings
from scheduler.contracts import errors, ids, ports

OPEN_PATHS = frozenset({"/health", "/openapi.json"})
_STREAMED = frozenset({"/forebay/v1/jobs", "/v1/files"})  # files go to disk as they come


class _Left(Exception):
    """The client left before its body was read."""


class Door:
    """Sets ``request.state.caller`` on every path but the open ones, and bounds the body.

    A JSON body is read here, up to the limit and not a byte further; any other body (an upload) is
    passed on as it comes and counted.
    """

    def __init__(
        self,
        app: types.ASGIApp,
        authenticator: ports.Authenticator,
        options: settings.GatewaySettings,
        room: bodies.Bodies,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._options = options
        self._room = room

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Pass the request on, or answer it with the error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _named(send)
        if scope["method"] == "HEAD":  # as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            headers = dict(scope["headers"])
            if scope["path"] not in OPEN_PATHS:
                caller = await self._authenticator.authenticate(
                    _text(headers.get(b"authorization"))
                )
                scope.setdefault("state", {})["caller"] = caller
            receive = await self._bounded(scope, headers, receive)
        except _Left:
            return
        except Exception as error:
            response = error_map.response(error_map.known(error))
            if isinstance(error, errors.Unauthenticated):
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _bounded(
        self, scope: types.Scope, headers: dict[bytes, bytes], receive: types.Receive
    ) -> types.Receive:
        buffered = scope["path"] not in _STREAMED or scope["method"] != "POST"
        limit = self._options.body_limit if buffered else self._options.upload_limit
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        if buffered and scope["method"] not in {"GET", "HEAD"}:
            with self._room.reading() as part:
                return await _read(receive, limit, part)
        return _counting(receive, limit)


def _named(send: types.Send) -> types.Send:
    """Give every answer an id by which it can be asked about."""

    async def named(message: types.Message) -> None:
        if message["type"] == "http.response.start":
            present = {name for name, _ in message["headers"]}
            if b"x-request-id" not in present:
                pairs = [(k.encode(), v.encode()) for k, v in error_map.named(ids.uuid7()).items()]
                message = {**message, "headers": [*message["headers"], *pairs]}
        await send(message)

    return named


async def _read(receive: types.Receive, limit: int, room: bodies.Reading) -> types.Receive:
    """Read the body now; a chunked one that grows over the limit is left unread."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        room.hold(size)
        parts.append(part)
        more = message.get("more_body", False)
    pending: list[types.Message] = [
        {"type": "http.request", "body": b"".join(parts), "more_body": False}
    ]

    async def replay() -> types.Message:
        return pending.pop() if pending else await receive()

    return replay


def _counting(receive: types.Receive, limit: int) -> types.Receive:
    size = 0

    async def counted() -> types.Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> errors.BodyTooLarge:
    return errors.BodyTooLarge(f"body: larger than the limit of {limit} bytes; send less at once")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
