"""Text on its way out: what may be a stop string or half a character is held back, ids with it.

A client never sees any part of a stop string, and whoever resumes from the released ids gets the
held-back text again instead of losing it.
"""

import codecs
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """Text that may go out now, the ids that it completes, and whether a stop string ended it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    stopped: bool = False


class StopFilter:
    """Watches one choice's text for its stop strings.

    Args:
        stops: the stop strings; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._ids: list[tuple[int, int]] = []  # (id, characters decoded when it was whole)
        self._decoded = 0
        self._sent = 0

    def feed(self, token_id: int, piece: bytes) -> Released:
        """Take one token's bytes; returns what may go out."""
        text = self._decoder.decode(piece)
        self._decoded += len(text)
        self._held += text
        # A token that ends inside a character is whole only with the next one.
        unfinished = bool(self._decoder.getstate()[0])
        self._ids.append((token_id, self._decoded + unfinished))
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            return self._release(min(found), stopped=True)
        return self._release(len(self._held) - self._suspicious())

    @property
    def ahead(self) -> list[int]:
        """The ids of tokens whose text is held back, all or in part."""
        return [token_id for token_id, _ in self._ids]

    def finish(self) -> Released:
        """Return what was held back: no stop string can follow any more."""
        rest = self._decoder.decode(b"", final=True)
        self._decoded += len(rest)
        self._held += rest
        released = self._release(len(self._held))
        leftover = tuple(token_id for token_id, _ in self._ids)
        self._ids.clear()
        return dataclasses.replace(released, token_ids=released.token_ids + leftover)

    def _suspicious(self) -> int:
        """Return how many characters at the end could begin a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _release(self, count: int, *, stopped: bool = False) -> Released:
        text, self._held = self._held[:count], self._held[count:]
        self._sent += count
        ready = tuple(token_id for token_id, at in self._ids if at <= self._sent)
        self._ids = [pair for pair in self._ids if pair[1] > self._sent]
        return Released(text, ready, stopped)
