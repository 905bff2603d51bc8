"""Which sampled tokens the text sent so far stands for.

An engine holds text back: half a character, or the beginning of what may become a stop string. A
token's id must be held back as long, or whoever resumes an answer from the ids would lose that text.
Pure: the spelling of a token is given.
"""

import collections
from collections.abc import Callable, Sequence

Speller = Callable[[int], str | None]
"""Returns the text that a choice's next token adds, None or "" while a character is incomplete."""


class Ledger:
    """One choice's tokens on their way out.

    Where a stop string cuts inside a token, the sent text ends inside it: the token is then not yet
    released though some of its characters are out (fewer than the longest stop string has).

    Args:
        spell: None if the tokens' text is not known: ids are then released with the next text.
    """

    def __init__(self, spell: Speller | None) -> None:
        self._spell = spell
        self._spelt = 0  # characters that the tokens so far make
        self._said = 0  # characters that were given out
        self._finished = False
        self._waiting: collections.deque[tuple[int, int]] = collections.deque()  # id, where it ends
        self._partial: list[int] = []  # ids of a character that is not whole yet

    def begin(self, token_ids: Sequence[int], shown: int, chars: int) -> None:
        """Note the beginning of an answer that goes on here: ``shown`` ids and ``chars`` of text are out."""
        self.add(token_ids, "")
        self._said = chars
        for _ in range(shown):
            if self._waiting:
                self._waiting.popleft()

    @property
    def ahead(self) -> list[int]:
        """The ids of tokens whose text is held back, all or in part."""
        return [*(token_id for token_id, _ in self._waiting), *self._partial]

    @property
    def said(self) -> int:
        """How many characters were given out."""
        return self._said

    def add(self, token_ids: Sequence[int], text: str, *, finished: bool = False) -> None:
        """Note sampled tokens and the text that the engine gives out with them."""
        self._said += len(text)
        self._finished = self._finished or finished
        for token_id in token_ids:
            piece = text if self._spell is None else self._spell(token_id)
            self._partial.append(token_id)
            if piece:
                self._spelt = self._said if self._spell is None else self._spelt + len(piece)
                self._waiting.extend((each, self._spelt) for each in self._partial)
                self._partial.clear()

    def release(self) -> list[int]:
        """Return the ids whose text is out, each once, in order."""
        released: list[int] = []
        while self._waiting and (self._finished or self._waiting[0][1] <= self._said):
            released.append(self._waiting.popleft()[0])
        if self._finished:
            released += self._partial
            self._partial.clear()
        return released
