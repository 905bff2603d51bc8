"""In which order lines run: those that share the beginning of their prompts one after the other. Pure.

The order of their texts is the order in which a walk through the tree of their prefixes meets them, so it
groups at every depth: what one line leaves in the prefix cache, the next one finds. Routing then sends
them to the replica that has it. Zheng et al., SGLang (NeurIPS 2024), show that this order is optimal for a
cache that is large enough for the longest request. A key stands for the text: digests of its beginnings,
each twice as long as the one before, so that keys are small and texts of any length are told apart.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from batch_jobs import jsontext

LINES = 512  # that are read at once when their turn is near
BYTES = 512 * 1024  # of their bodies
_DEPTHS = tuple(128 << step for step in range(11))  # to 128 KiB, some 30,000 tokens
_DIGEST = 4  # bytes of each: two texts that share one by chance lie beside each other, no more


def key(body: Mapping[str, Any]) -> bytes:
    """Return what a line's place goes by; keys of one length, whose order is that of the lines."""
    text = prefix(body)
    digest = hashlib.blake2b(
        str(body.get("model", "")).encode(errors="replace"), digest_size=_DIGEST
    )
    found: list[bytes] = []
    done = 0
    for depth in _DEPTHS:
        if done < len(text):  # else this depth says what the one before said
            digest.update(text[done:depth])
            done = depth
            found.append(digest.digest())
        else:
            found.append(found[-1] if found else digest.digest())
    return b"".join(found)


def prefix(body: Mapping[str, Any]) -> bytes:
    """Return the beginning of a line's prompt."""
    prompt = next((body[name] for name in ("messages", "prompt", "input") if name in body), "")
    if isinstance(prompt, str):
        return prompt[: _DEPTHS[-1]].encode(errors="replace")
    parts: list[bytes] = []
    size = 0
    for part in prompt if isinstance(prompt, list) else ():
        text = jsontext.write(part)
        parts.append(text[: _DEPTHS[-1] - size])
        size += len(parts[-1])
        if size >= _DEPTHS[-1]:
            break
    return b"".join(parts)


def shared(one: bytes, other: bytes) -> int:
    """Return how many bytes two prefixes have in common at their beginning."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def saved(prefixes: Sequence[bytes]) -> int:
    """Return the bytes that each has in common with the one before it, summed: what an order is worth."""
    return sum(shared(one, other) for one, other in itertools.pairwise(prefixes))
