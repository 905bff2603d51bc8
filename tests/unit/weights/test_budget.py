"""What leaves a full disk."""

import pytest

from engines.weights import budget


def entry(
    key: str, size: int, used: int, *, busy: bool = False, whole: bool = True
) -> budget.Entry:
    return budget.Entry(key, size, used, busy, whole)


ROOM = budget.Room(free=10_000, budget=100, reserve=0)


def test_nothing_leaves_while_there_is_room() -> None:
    assert budget.decide(40, 0, [entry("a", 60, 1)], ROOM) == budget.Verdict((), 0)


def test_the_longest_unused_leaves_and_no_more_than_needed() -> None:
    entries = [entry("new", 40, 9), entry("old", 30, 1), entry("mid", 30, 5)]
    assert budget.decide(30, 0, entries, ROOM).victims == ("old",)
    assert budget.decide(31, 0, entries, ROOM).victims == ("old", "mid")


def test_what_is_only_begun_leaves_first() -> None:
    entries = [entry("old", 50, 1), entry("begun", 50, 9, whole=False)]
    assert budget.decide(50, 0, entries, ROOM).victims == ("begun",)


def test_nothing_leaves_in_vain_and_nothing_that_is_used() -> None:
    entries = [entry("used", 80, 1, busy=True), entry("free", 20, 2)]
    assert budget.decide(90, 0, entries, ROOM) == budget.Verdict((), 70)
    assert budget.decide(101, 0, entries, ROOM).never


@pytest.mark.parametrize(("there", "victims"), [(0, ("a",)), (30, ())])
def test_the_file_system_bounds_too_and_what_is_there_needs_no_room(
    there: int, victims: tuple[str, ...]
) -> None:
    room = budget.Room(free=50, budget=0, reserve=20)
    assert budget.decide(60, there, [entry("a", 40, 1)], room).victims == victims


def test_what_another_staging_has_still_to_write_is_taken() -> None:
    coming = budget.Entry("coming", 10, 1, busy=True, whole=False, coming=50)
    assert budget.decide(40, 0, [coming], ROOM) == budget.Verdict((), 0)
    assert budget.decide(41, 0, [coming], ROOM) == budget.Verdict((), 1)
    disk = budget.Room(free=80, budget=0, reserve=0)
    assert budget.decide(31, 0, [coming], disk) == budget.Verdict((), 1)
    assert not budget.decide(90, 0, [coming], disk).never
