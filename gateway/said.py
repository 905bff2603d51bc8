"""What an answer says, whether it was streamed or whole: for comparing two answers to one request. Pure."""

import collections
import json
from collections.abc import Iterator, Mapping
from typing import Any

_DATA = b"data: "
_LAST = ("response.completed", "response.incomplete")  # at its end, or at max_output_tokens
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


def text(answer: bytes) -> str | None:
    """Return an answer's text with the calls of tools in it, choice by choice; None if it has none.

    Args:
        answer: the client's bytes: events of a stream, or one JSON object.
    """
    found: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    try:
        for value in _values(answer):
            for place, piece in _pieces(value):
                found[place].append(piece)
    except (ValueError, TypeError, AttributeError):
        return None  # of a kind that is not known here
    if not found:
        return None
    return "\0".join(f"{place}\0{''.join(pieces)}" for place, pieces in sorted(found.items()))


def greedy(body: Mapping[str, Any]) -> bool:
    """Return whether a request's answer depends on nothing but the model."""
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature == 0


def _values(answer: bytes) -> Iterator[Mapping[str, Any]]:
    if answer.lstrip()[:1] == b"{":
        yield json.loads(answer)
        return
    for line in answer.splitlines():
        if line.startswith(_DATA) and line[len(_DATA) :].strip() != b"[DONE]":
            yield json.loads(line[len(_DATA) :])


def _pieces(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts of a chunk or an answer, each with the place that it belongs to."""
    for choice in value.get("choices") or ():
        at = f"{choice.get('index', 0)}"
        if isinstance(choice.get("text"), str):
            yield at, choice["text"]
        message = choice.get("delta") or choice.get("message") or {}
        for name in _TEXTS:
            if message.get(name):
                yield f"{at} {name}", message[name]
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            for name in ("name", "arguments"):
                if function.get(name):
                    yield f"{at} {call.get('index', number)} {name}", function[name]
    # /v1/responses: a stream's last event repeats the whole answer, so its pieces are passed over.
    response = value.get("response") if value.get("type") in _LAST else value
    for number, item in enumerate((response or {}).get("output") or ()):
        for part in item.get("content") or ():
            if isinstance(part.get("text"), str):
                yield f"{number}", part["text"]
        for name in ("name", "arguments"):
            if isinstance(item.get(name), str):
                yield f"{number} {name}", item[name]
