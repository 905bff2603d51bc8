"""Where a prefix was sent last, so that the next request with it finds its KV blocks there.

A hint only: routing drops it as soon as that replica is loaded beyond its bound.
"""

import collections
import hashlib
from collections.abc import Iterator
from typing import Any

from scheduler.contracts import ids, requests

PREFIX_CHARS = 1024  # what is fingerprinted: about 256 tokens, two to eight KV blocks
LEAST_CHARS = 128  # below one KV block nothing is shared


def fingerprint(request: requests.InferenceRequest) -> bytes | None:
    """Return a fingerprint of the prompt's beginning, or None where it is too short to share.

    It covers the adapter and the tools too: they stand before the messages in the engine's prompt.
    """
    if request.endpoint is requests.Endpoint.EMBEDDINGS:
        return None
    text = ""
    for piece in _pieces(request.body):
        text += piece + "\0"
        if len(text) >= PREFIX_CHARS:
            break
    if len(text) < LEAST_CHARS:
        return None
    key = f"{request.model}\0{request.adapter}\0{text[:PREFIX_CHARS]}"
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _pieces(body: Any) -> Iterator[str]:
    prompt = body.get("prompt")
    if prompt is not None:
        yield prompt if isinstance(prompt, str) else repr(prompt[:256])
        return
    if body.get("tools"):
        yield repr(body["tools"])[:PREFIX_CHARS]
    for message in body.get("messages") or ():
        content = message.get("content")
        yield str(message.get("role"))
        yield content[:PREFIX_CHARS] if isinstance(content, str) else repr(content)[:PREFIX_CHARS]


class Homes:
    """The newest replica of each fingerprint; the least recently used are forgotten."""

    def __init__(self, size: int = 8192) -> None:
        self._size = size
        self._homes: collections.OrderedDict[bytes, ids.ReplicaId] = collections.OrderedDict()

    def find(self, print_: bytes | None) -> ids.ReplicaId | None:
        """Return where this prefix went last."""
        return None if print_ is None else self._homes.get(print_)

    def note(self, print_: bytes | None, replica_id: ids.ReplicaId) -> None:
        """Remember that a request with this prefix goes to ``replica_id``."""
        if print_ is None:
            return
        self._homes[print_] = replica_id
        self._homes.move_to_end(print_)
        if len(self._homes) > self._size:
            self._homes.popitem(last=False)
