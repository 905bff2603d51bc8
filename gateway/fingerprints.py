"""A prompt's fingerprints: they tell equal beginnings from others, without a tokenizer.

The text is laid out as an engine's template would (tools and arguments first, then the messages in their
order), cut into chunks (`prefixes.ends`), and each chunk's hash goes into the next one's, so that each
stands for all of the text before its end. Equal fingerprints mean equal KV blocks as far as anything here
can know: adapter, salt, tools and the template's arguments go into the first hash. The version does not:
it is drawn later, and a replica has one version only.

The hash is XXH3, at a tenth of blake2b's cost a byte. It is no cryptographic one: whoever makes two texts
collide sends their own requests to the wrong replica, where the engine's own cache compares tokens.
"""

import array
import itertools
import marshal
from collections.abc import Mapping
from typing import Any

import xxhash

from scheduler.contracts import requests
from scheduler.core import prefixes

# Fields that change what the engine's template makes of the messages, and so every block's tokens.
_BEFORE = (
    "tools", "functions", "tool_choice", "documents", "chat_template", "chat_template_kwargs",
    "mm_processor_kwargs", "add_special_tokens", "reasoning_effort", "reasoning",
)  # fmt: skip
_ANY = frozenset(_BEFORE)
_PLAIN = frozenset({"role", "content"})
_TEXTS = frozenset({"text", "input_text", "output_text"})


def of(
    request: requests.InferenceRequest, chunk_bytes: int = prefixes.CHUNK_BYTES
) -> prefixes.Prefix:
    """Return the fingerprints of a request's prompt; none for what is read once."""
    if request.endpoint.pooled:
        return prefixes.NONE
    body = request.body
    found = chain(_seed(request.model, request.adapter, body), _text(body), chunk_bytes)
    prompt = body.get("prompt")
    if type(prompt) is list and len(prompt) > 1 and isinstance(prompt[0], str | list):
        # The others are computed with the first, and are no part of its beginning.
        rest = prompt[1:]
        texts = isinstance(prompt[0], str)
        behind = "".join(rest) if texts else [*itertools.chain.from_iterable(rest)]
        return prefixes.Prefix(found.chain, found.size + len(_bytes(behind)))
    return found


def chain(seed: int, text: bytes, chunk_bytes: int = prefixes.CHUNK_BYTES) -> prefixes.Prefix:
    """Return the fingerprints of ``text``, each chained to the one before and to ``seed``."""
    found: list[int] = []
    size, start, end = len(text), 0, max(1, chunk_bytes // prefixes.FIRST_FRACTION)
    whole, state = memoryview(text), seed
    while end <= size:
        state = xxhash.xxh3_64_intdigest(whole[start:end], state)
        found.append(state)
        start, end = end, end * 2 if end < chunk_bytes else end + chunk_bytes
    return prefixes.Prefix(tuple(found), size)


def _seed(model: str, adapter: str | None, body: Mapping[str, Any]) -> int:
    # Most bodies name none of these fields; the intersection says so without a loop.
    before = (
        {name: body[name] for name in _BEFORE if body.get(name)} if _ANY & body.keys() else None
    )
    salt = body.get("cache_salt")  # vLLM shares blocks between requests of one salt only
    head = f"{model}\0{adapter or ''}\0{salt or ''}\0".encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(head + _packed(before) if before else head)


def _text(body: Mapping[str, Any]) -> bytes:
    prompt = body.get("prompt")
    if prompt is not None:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # of several prompts the first: they run on one replica
        return _bytes(prompt)
    parts: list[bytes] = []
    for message in body.get("messages") or _items(body):
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        parts.append(f"\0{message.get('role')}\0".encode("utf-8", "surrogatepass"))
        if type(content) is str:
            parts.append(content.encode("utf-8", "surrogatepass"))
        elif content is not None:
            parts.append(_bytes(content))
        if len(message) > 2:  # names, tool calls and their ids: whole, after the text
            rest = {key: value for key, value in message.items() if key not in _PLAIN}
            parts.append(_packed(rest))
    return b"".join(parts)


def _items(body: Mapping[str, Any]) -> list[Any]:
    """Return the messages that a template makes of `/v1/responses`: a chat's, so that they share a prefix."""
    given, found = body.get("input"), list[Any]()
    if body.get("instructions"):
        found.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        found.append({"role": "user", "content": given})
    elif isinstance(given, list):
        found += given
    return found


def _bytes(value: Any) -> bytes:
    """Return text as it is, so that a longer text begins with a shorter one's bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            try:
                return array.array("I", value).tobytes()
            except (
                TypeError,
                ValueError,
                OverflowError,
            ):  # ids are checked, parts of a message are not
                return _packed(value)
        return b"".join([_part(each) for each in value])
    return _packed(value)


def _part(part: Any) -> bytes:
    """Return one part of a message's content; a picture counts by all of its bytes."""
    if isinstance(part, Mapping) and part.get("type") in _TEXTS:
        text = part.get("text")
        if isinstance(text, str):
            return text.encode("utf-8", "surrogatepass")
    return _packed(part)


def _packed(value: Any) -> bytes:
    """Return JSON values as bytes, at a tenth of what `json.dumps` takes.

    Version 0 of the format writes values alone: later ones write whether a string is interned and how
    often an object is used, which two workers would not agree on.
    """
    return marshal.dumps(value, 0)
