"""Server-sent events: the one that we write ourselves, and the reading that gRPC needs."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from gateway import error_map
from scheduler.contracts import errors, requests

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the stream otherwise
}


def error_event(error: errors.ForebayError, endpoint: requests.Endpoint) -> bytes:
    """Return the event that ends a broken stream; no ``[DONE]`` follows it.

    Events of `/v1/responses` have a name and a type; OpenAI's client raises the ``error`` beside them.
    """
    if endpoint is not requests.Endpoint.RESPONSES:
        return b"data: " + error_map.body(error) + b"\n\n"
    said = error.openai()
    told = {"type": "error", **{k: v for k, v in said["error"].items() if k != "type"}, **said}
    return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What the events of one DATA frame say."""

    text: str = ""
    finish_reason: str | None = None


def read(payload: bytes) -> Piece:
    """Read whole OpenAI chunk events, of chat or of completions, with one choice.

    Raises:
        errors.EngineFailed: they are none; nothing of them is left out in silence.
    """
    text, reason = "", None
    try:
        for value in _events(payload):
            for choice in value.get("choices") or ():
                delta = choice.get("delta")
                piece = delta.get("content") if isinstance(delta, dict) else choice.get("text")
                text += piece or ""
                reason = choice.get("finish_reason") or reason
    except (ValueError, TypeError, AttributeError) as fault:
        raise errors.EngineFailed(f"the engine's answer is no stream of chunks: {fault}") from fault
    return Piece(text, reason)


def _events(payload: bytes) -> Iterator[dict[str, Any]]:
    for line in payload.splitlines():
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            value = json.loads(data)
            if isinstance(value, dict):
                yield value
