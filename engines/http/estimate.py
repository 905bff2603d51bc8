"""What an answer took where a server tells no usage: by characters, and marked as an estimate. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

CHARS_A_TOKEN = 4  # English prose with the vocabularies in use
_TEXTS = ("prompt", "input", "query", "documents", "instructions")


def prompt_tokens(raw: bytes) -> int:
    """Return the tokens that a request's body has a model read: ids exactly, text by its characters."""
    try:
        body = json.loads(raw)
    except ValueError:
        return 0
    if not isinstance(body, dict):
        return 0
    ids, chars = 0, 0
    for each in _leaves([body.get(name) for name in _TEXTS]):
        ids, chars = (ids, chars + len(each)) if isinstance(each, str) else (ids + 1, chars)
    for message in body.get("messages") or ():
        if isinstance(message, Mapping):
            chars += sum(
                len(text) for text in _leaves(message.get("content")) if isinstance(text, str)
            )
    documents = body.get("documents")
    if isinstance(documents, list) and isinstance(body.get("query"), str):
        chars += max(0, len(documents) - 1) * len(body["query"])  # each is read beside it
    return ids + _tokens(chars)


def output_tokens(answer: Any) -> int:
    """Return the tokens of the text in a whole answer's choices."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    chars = 0
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, Mapping):
            continue
        message = choice.get("message")
        said = message.get("content") if isinstance(message, Mapping) else choice.get("text")
        chars += len(said) if isinstance(said, str) else 0
    return _tokens(chars)


def _tokens(chars: int) -> int:
    return -(-chars // CHARS_A_TOKEN)


def _leaves(value: Any) -> Iterator[str | int]:
    """Yield texts and token ids, however deep; of a message's parts the texts."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, Mapping):
        yield from _leaves(value.get("text"))
