"""Whole server-sent events out of byte chunks cut anywhere, and the few things read from them.

Works on bytes only: a character cut by a chunk boundary is never decoded in halves. Most events are
passed on unparsed; JSON is read only where an event ends a choice or reports an error.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

DONE = b"[DONE]"
MAX_EVENT = 64 * 1024 * 1024
_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_ENDS_CHOICE = re.compile(rb'"finish_reason"\s*:\s*"')
_MAY_BE_ERROR = re.compile(rb'"(error|object)"\s*:\s*(\{|"error")')


class Splitter:
    """Collects bytes and yields whole events, each with its blank line."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return bytes(self._buffer)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take ``chunk`` and yield the events that are now whole.

        Raises:
            ValueError: one event grew over `MAX_EVENT`.
        """
        searched = max(0, len(self._buffer) - 3)
        self._buffer += chunk
        start = 0
        try:
            while match := _BOUNDARY.search(self._buffer, max(start, searched)):
                yield bytes(self._buffer[start : match.end()])
                start = match.end()
        finally:
            del self._buffer[:start]
        if len(self._buffer) > MAX_EVENT:
            raise ValueError(f"server-sent event over {MAX_EVENT} bytes")


def data(event: bytes) -> bytes:
    """Return an event's data: its ``data:`` lines joined; b"" for a comment."""
    lines = [line[5:].lstrip(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineError:
    """An error that an engine reported inside an answer: its HTTP status, and its own words."""

    status: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What an event says beyond its bytes.

    Attributes:
        done: it is the stream's last event: ``[DONE]``, or the finished response.
        finished: (choice, reason) for each choice that it ends.
        error: the engine's error, if it is one.
        opening: it stands before all text, and says that there will be some.
        skip: it is not for the client.
    """

    done: bool = False
    finished: tuple[tuple[int, str], ...] = ()
    error: EngineError | None = None
    opening: bool = False
    skip: bool = False


PLAIN = Reading()


def read(event: bytes) -> Reading:
    """Say what ``event`` means; cheap for the many that carry only text."""
    ends = _ENDS_CHOICE.search(event)
    suspicious = _MAY_BE_ERROR.search(event)
    if not ends and not suspicious and DONE not in event:
        return PLAIN
    payload = data(event)
    if payload == DONE:
        return Reading(done=True)
    if not ends and not suspicious:
        return PLAIN
    try:
        value = json.loads(payload)
    except ValueError:
        return PLAIN
    return read_json(value)


def read_json(value: Any) -> Reading:
    """Say what a parsed chunk or a whole JSON answer means."""
    if not isinstance(value, dict):
        return PLAIN
    error = value.get("error")
    if value.get("object") == "error":
        error = value
    if isinstance(error, dict):
        return Reading(error=_engine_error(error))
    finished = tuple(
        (int(choice.get("index") or 0), str(choice["finish_reason"]))
        for choice in value.get("choices") or ()
        if isinstance(choice, dict) and choice.get("finish_reason")
    )
    return Reading(finished=finished)


def _engine_error(error: dict[str, Any]) -> EngineError:
    status = error.get("code", error.get("status"))
    known = status if isinstance(status, int) and 400 <= status <= 599 else 500
    return EngineError(known, str(error.get("message") or "no message"))


def error_event(body: dict[str, Any]) -> bytes:
    """Return an error as an event, in OpenAI's shape."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"
