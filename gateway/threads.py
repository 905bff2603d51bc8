"""Which conversation a request belongs to, as far as its body tells. Pure.

A chat grows at its end, so its beginning up to the first words of its user stays: the system prompt alone
would make one conversation of all that share it. A completion grows too; its first characters stay.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from scheduler.contracts import requests

_FIRST_CHARS = 256
_FIRST_IDS = 64


def key(request: requests.InferenceRequest) -> int:
    """Return the conversation's key, from 1; 0 for a request that belongs to none.

    The caller's own hint goes before what the text says; keys of two teams never meet.
    """
    if request.cache_hint is not None:
        said: Any = request.cache_hint
    else:
        said = _beginning(request.body)
    if not said:
        return 0
    text = repr((request.caller.team, request.model, said))
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) or 1


def _beginning(body: Mapping[str, Any]) -> Any:
    for name in ("messages", "prompt", "input"):
        given = body.get(name)
        if isinstance(given, str):
            return given[:_FIRST_CHARS]
        if not isinstance(given, list) or not given:
            continue
        first = given[0]
        if isinstance(first, dict):
            return _first_words(given)
        return given[:_FIRST_IDS] if isinstance(first, int) else first[:_FIRST_CHARS]
    return None


def _first_words(messages: Sequence[Any]) -> Sequence[Any]:
    for at, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: at + 1]
    return messages[:1]
