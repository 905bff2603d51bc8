"""Token ids go out with the text that they stand for, never before it."""

import random
from collections.abc import Iterator

import hypothesis
from hypothesis import strategies

from engines.vllm import ledger


def speller(*pieces: str | None) -> ledger.Speller:
    waiting: Iterator[str | None] = iter(pieces)
    return lambda token_id: next(waiting)


def test_text_at_once_releases_at_once() -> None:
    book = ledger.Ledger(speller("ab", "c"))
    book.add([1, 2], "abc")

    assert book.release() == [1, 2]
    assert book.release() == []


def test_half_a_character_waits_for_the_other_half() -> None:
    book = ledger.Ledger(speller(None, None, "漢", "x"))
    book.add([1], "")
    assert book.release() == []
    book.add([2], "")
    assert book.release() == []
    book.add([3], "漢")
    assert book.release() == [1, 2, 3]
    book.add([4], "x")
    assert book.release() == [4]


def test_held_back_text_holds_its_ids_back() -> None:
    """A stop string of five characters: four are held back."""
    book = ledger.Ledger(speller("JK", "LM", "N", "Q"))
    book.add([1], "")
    book.add([2], "")
    assert book.release() == []
    book.add([3], "J")
    assert book.release() == []  # the text ends inside token 1
    book.add([4], "KL")
    assert book.release() == [1]
    book.add([], "MNQ", finished=True)
    assert book.release() == [2, 3, 4]


def test_the_end_releases_everything() -> None:
    """A stop string that is cut off, a special token that says nothing, half a character."""
    book = ledger.Ledger(speller("JK", "LMNOP", None))
    book.add([1, 2, 3], "JK", finished=True)

    assert book.release() == [1, 2, 3]


def test_without_a_speller_ids_go_with_the_next_text() -> None:
    book = ledger.Ledger(None)
    book.add([1], "")
    assert book.release() == []
    book.add([2], "ab")
    assert book.release() == [1, 2]
    book.add([3], "", finished=True)
    assert book.release() == [3]


PIECES = strategies.lists(
    strategies.one_of(strategies.none(), strategies.text("xyz", min_size=1, max_size=4)),
    max_size=20,
)


@hypothesis.given(PIECES, strategies.integers(0, 6), strategies.randoms(use_true_random=False))
def test_what_is_released_is_never_ahead_and_all_in_the_end(
    pieces: list[str | None], held: int, chance: random.Random
) -> None:
    book = ledger.Ledger(speller(*pieces))
    whole, sent, released = "", "", []
    for n, piece in enumerate(pieces):
        whole += piece or ""
        text = whole[len(sent) : max(len(sent), len(whole) - held)]
        sent += text
        book.add([n], text)
        if chance.random() < 0.7:
            released += book.release()
            assert sent.startswith("".join(pieces[n] or "" for n in released))
    book.add([], whole[len(sent) :], finished=True)
    released += book.release()

    assert released == list(range(len(pieces)))
