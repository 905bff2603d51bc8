"""What HTTP/1.1 (RFC 9112) asks of a head beyond what the parser checks, and refusals without a request.

Knows bytes only. A refusal here has OpenAI's shape and an id, as every other.
"""

import collections
import http
import re

import httptools

from gateway import error_map, settings
from scheduler.contracts import errors, ids

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class _Refused(errors.BadRequest):
    """An error that only HTTP knows."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Doors:
    """Counts a process's connections.

    Args:
        limits: the [gateway] table.
    """

    def __init__(self, limits: settings.GatewaySettings) -> None:
        self._limits = limits
        self._count = 0
        self._peers: collections.Counter[str] = collections.Counter()

    def enter(self, peer: tuple[str, int] | None) -> errors.Busy | None:
        """Count a connection; returns why it can't stay, if it can't."""
        self._count += 1
        if self._limits.connections_per_peer and peer is not None:
            self._peers[peer[0]] += 1
        if self._count > self._limits.connections:
            return errors.Busy("too many connections to this gateway: try again", retry_after_s=1.0)
        if peer is not None and self._peers[peer[0]] > self._limits.connections_per_peer:
            return errors.Busy(
                "too many connections from this address: use them again, or fewer",
                retry_after_s=1.0,
            )
        return None

    def leave(self, peer: tuple[str, int] | None) -> None:
        """Count one less."""
        self._count -= 1
        if peer is not None and peer[0] in self._peers:
            self._peers[peer[0]] -= 1
            if self._peers[peer[0]] <= 0:
                del self._peers[peer[0]]


def check(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Judge a head's version and the headers that say how it is to be read.

    Raises:
        errors.BadRequest: it can't be read without doubt.
    """
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            if version == "1.0":
                raise _Refused(400, "Transfer-Encoding: HTTP/1.0 has none; send Content-Length")
            if value.strip().lower() != b"chunked":
                raise _Refused(501, "Transfer-Encoding: only chunked is understood here")
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise _Refused(415, "Content-Encoding: bodies are taken as they are; send it unencoded")
    if version not in ("1.1", "1.0"):
        raise _Refused(505, "HTTP version: HTTP/1.1 is spoken here")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise _Refused(400, "Host: send exactly one")


def bounded(target: bytes, headers: list[tuple[bytes, bytes]], most: int) -> None:
    """Judge a head's size where all of it came at once, which is as large as if it had come in pieces.

    Raises:
        errors.BadRequest: it is larger than ``most`` bytes.
    """
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > most:
        raise too_large()


def origin_form(method: bytes, target: bytes) -> bytes:
    """Return a request target as path and query; the authority of an absolute one is not looked at.

    Raises:
        errors.BadRequest: it is none of the forms that a server takes (RFC 9112, 3.2).
    """
    if b"#" in target:
        raise _Refused(
            400, "request target: a fragment (#) is never sent to a server; leave it out"
        )
    if target.startswith(b"/"):
        return target
    if target == b"*" and method == b"OPTIONS":
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None or not absolute[1] or b"@" in absolute[1]:
        raise _Refused(400, "request target: must be a path, or an http URL without a user's name")
    rest = target[absolute.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


def reason(fault: BaseException) -> errors.ForebayError:
    """Return what the parser's complaint means to a client: what was raised in a callback, if anything."""
    cause = fault.__context__
    if isinstance(fault, httptools.HttpParserCallbackError) and isinstance(
        cause, errors.BadRequest
    ):
        return cause
    return _Refused(400, "this is no HTTP/1.1 request: send one, without TLS or HTTP/2")


def too_large() -> errors.ForebayError:
    """Return the refusal of a head without end."""
    return _Refused(431, "the request's headers are larger than 64 KiB: send less")


def late_body() -> errors.ForebayError:
    """Return the refusal of a body that does not come."""
    return errors.BodyLate("body: it did not come in time; send it at once")


def late_head() -> errors.ForebayError:
    """Return the refusal of a head that does not end."""
    return _Refused(408, "the request's head did not come in time; send it at once")


def refusal(error: errors.ForebayError, default: list[tuple[bytes, bytes]]) -> bytes:
    """Return a whole response for ``error``, after which the connection ends."""
    body = error_map.body(error)
    phrase = http.HTTPStatus(error.status).phrase
    fields = {
        **error_map.headers(error),
        **error_map.named(ids.uuid7()),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} {phrase}".encode()]
    lines += [b"%b: %b" % pair for pair in default]
    lines += [f"{name}: {value}".encode() for name, value in fields.items()]
    return b"\r\n".join([*lines, b"", body])
