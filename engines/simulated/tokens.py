"""A reversible tokenizer for the simulated engine: made-up words, and bytes for all else.

Ids 0–255 are bytes; from 256 on come words with a leading space, built from syllables so that nothing
has to be stored or downloaded. A few hold characters of several bytes, since those find the bugs.
"""

import functools
import itertools
import re
from collections.abc import Iterable

BYTES = 256
_SYLLABLES = (
    "ba",
    "ce",
    "di",
    "fo",
    "gu",
    "ha",
    "je",
    "ki",
    "lo",
    "mu",
    "na",
    "pe",
    "ri",
    "so",
    "tu",
    "va",
)
_WIDE = (" naïve", " déjà", " 漢字", " 🦀", " Übung", " żółw", " ελιά", " 水")
WORDS: tuple[str, ...] = (
    *_WIDE,
    *(f" {''.join(pair)}" for pair in itertools.product(_SYLLABLES, repeat=2)),
    *(f" {''.join(triple)}" for triple in itertools.product(_SYLLABLES[:8], repeat=3)),
)
SIZE = BYTES + len(WORDS)
_IDS = {word: BYTES + index for index, word in enumerate(WORDS)}
_PIECE = re.compile(r" \S+|\s|\S+")


@functools.lru_cache(maxsize=4096)
def _piece(piece: str) -> tuple[int, ...]:
    known = _IDS.get(piece)
    return (known,) if known is not None else tuple(piece.encode())


def encode(text: str) -> list[int]:
    """Return the ids of ``text``; `decode` gives it back exactly."""
    return [token for piece in _PIECE.findall(text) for token in _piece(piece)]


def token_bytes(token: int) -> bytes:
    """Return what one id stands for.

    Raises:
        ValueError: there is no such id.
    """
    if 0 <= token < BYTES:
        return bytes((token,))
    if BYTES <= token < SIZE:
        return WORDS[token - BYTES].encode()
    raise ValueError(f"token id {token} is not in 0..{SIZE - 1}")


def decode(ids: Iterable[int]) -> str:
    """Return the text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, ids)).decode(errors="replace")
