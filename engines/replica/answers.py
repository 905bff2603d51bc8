"""Small ASGI answers in JSON, and the reading of a request's body."""

import json
from typing import Any

from starlette import types

MAX_BODY = 256 * 1024 * 1024  # the gateway's own limit is far below; this only bounds a mistake


class ClientGone(Exception):
    """The client left before its request was read."""


async def read_body(receive: types.Receive) -> bytes:
    """Return the whole body.

    Raises:
        ClientGone: it left in the middle.
        ValueError: the body is over `MAX_BODY`.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise ValueError(f"body over {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_json(send: types.Send, status: int, value: Any) -> None:
    """Send one JSON answer."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """Return an OpenAI error body."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def send_error(send: types.Send, status: int, code: str, message: str, **extra: Any) -> None:
    """Send an OpenAI error; ``extra`` stands beside ``error`` in the body."""
    await send_json(send, status, {**error_body(status, code, message), **extra})
