"""In which order lines run: those that share the beginning of their prompts one after the other. Pure.

The order of their texts is the order in which a walk through the tree of their prefixes meets them, so it
groups at every depth: what one line leaves in the prefix cache, the next one finds. Routing then sends
them to the replica that has it. Zheng et al., SGLang (NeurIPS 2024), show that this order is optimal for a
cache that is large enough for the longest request.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from batch_jobs import jsontext

LINES = 2_048  # that are put in order at once
BYTES = 2 * 1024 * 1024  # of their bodies: what a job keeps in memory
_KEY_BYTES = 4_096  # some 1,000 tokens: lines that share that much and no more are near enough


def prefix(body: Mapping[str, Any]) -> bytes:
    """Return what a line's place goes by: the beginning of its prompt."""
    prompt = next((body[name] for name in ("messages", "prompt", "input") if name in body), "")
    if isinstance(prompt, str):
        return prompt[:_KEY_BYTES].encode(errors="replace")
    parts: list[bytes] = []
    size = 0
    for part in prompt if isinstance(prompt, list) else ():
        text = jsontext.write(part)
        parts.append(text[: _KEY_BYTES - size])
        size += len(parts[-1])
        if size >= _KEY_BYTES:
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
