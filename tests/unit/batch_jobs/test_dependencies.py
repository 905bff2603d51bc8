"""Dependencies and arrays read by Slurm's rules, and what they come to."""

from collections.abc import Callable, Iterable

import pytest

from batch_jobs import arrays, dependencies
from batch_jobs.dependencies import Fate, Kind, Met, Ref


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0-15:4%2", (tuple(range(0, 16, 4)), 2)),
        ("1,3,5-7", ((1, 3, 5, 6, 7), 0)),
        ("7", ((7,), 0)),
        ("5,5,5-6", ((5, 6), 0)),
        ("0-1000", (tuple(range(1_001)), 0)),
    ],
)
def test_arrays(text: str, want: tuple[tuple[int, ...], int]) -> None:
    found = arrays.read(text)
    assert (found.tasks, found.limit) == want


@pytest.mark.parametrize(
    "text", ["", "5-1", "a", "1-", "-1", "1-5:0", "0-1001", "1%0", "1%x", "1,,2", "1 - 2", "²"]
)
def test_arrays_of_nothing_and_nonsense_are_refused(text: str) -> None:
    with pytest.raises(arrays.ArrayError):
        arrays.read(text)


@pytest.mark.parametrize(
    ("text", "kinds", "any_of"),
    [
        ("afterok:1:2,afterany:3", (Kind.AFTEROK, Kind.AFTERANY), False),
        ("afterok:1?afternotok:2_3", (Kind.AFTEROK, Kind.AFTERNOTOK), True),
        ("singleton", (None,), False),
        ("after:4,singleton", (Kind.AFTER, None), False),
        ("afterany:slurm:4711:12", (Kind.AFTERANY,), False),
    ],
)
def test_dependencies(text: str, kinds: tuple[Kind | None, ...], any_of: bool) -> None:
    found = dependencies.read(text)
    assert tuple(term.kind for term in found.terms) == kinds
    assert found.any_of is any_of


def test_a_slurm_job_is_told_from_ours() -> None:
    found = dependencies.read("afterany:slurm:4711:12_3")
    assert found.refs == (Ref(4711, None, slurm=True), Ref(12, 3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("afterok:1,afterany:2?afterok:3", "can't be mixed"),
        ("afterok", "names no job"),
        ("afterok:", "no job id"),
        ("afterok:x", "no job id"),
        ("beforeok:1", "no kind"),
        ("singleton:4", "no kind"),
        ("afterok:slurm", "names no job"),
        ("afterok:slurm:1_2", "no job id"),
        ("afterok:1,", "no kind"),
    ],
)
def test_dependencies_that_are_none_are_refused(text: str, words: str) -> None:
    with pytest.raises(dependencies.DependencyError, match=words):
        dependencies.read(text)


def standing(**by: Fate) -> Callable[[Ref], Iterable[Fate]]:
    return lambda ref: [by[f"j{ref.job_id}"]] if f"j{ref.job_id}" in by else list(by.values())


@pytest.mark.parametrize(
    ("text", "fates", "want"),
    [
        ("afterok:1", {"j1": Fate.OK}, Met.MET),
        ("afterok:1", {"j1": Fate.RUNNING}, Met.OPEN),
        ("afterok:1", {"j1": Fate.NOT_OK}, Met.NEVER),
        ("afterok:1", {"j1": Fate.UNKNOWN}, Met.OPEN),
        ("afterany:1", {"j1": Fate.NOT_OK}, Met.MET),
        ("afternotok:1", {"j1": Fate.OK}, Met.NEVER),
        ("afternotok:1", {"j1": Fate.NOT_OK}, Met.MET),
        ("after:1", {"j1": Fate.RUNNING}, Met.MET),
        ("after:1", {"j1": Fate.WAITING}, Met.OPEN),
        ("afterok:1:2", {"j1": Fate.OK, "j2": Fate.RUNNING}, Met.OPEN),
        ("afterok:1,afterany:2", {"j1": Fate.NOT_OK, "j2": Fate.RUNNING}, Met.NEVER),
        ("afterok:1?afterany:2", {"j1": Fate.NOT_OK, "j2": Fate.RUNNING}, Met.OPEN),
        ("afterok:1?afterany:2", {"j1": Fate.NOT_OK, "j2": Fate.OK}, Met.MET),
        ("afterok:1?afterok:2", {"j1": Fate.NOT_OK, "j2": Fate.NOT_OK}, Met.NEVER),
        ("afterok:9", {"j1": Fate.OK, "j2": Fate.WAITING}, Met.OPEN),  # an array's tasks
        ("afternotok:9", {"j1": Fate.OK, "j2": Fate.NOT_OK}, Met.MET),
        ("afternotok:9", {"j1": Fate.OK, "j2": Fate.OK}, Met.NEVER),
    ],
)
def test_what_dependencies_come_to(text: str, fates: dict[str, Fate], want: Met) -> None:
    wanted = dependencies.read(text)
    assert dependencies.judge(wanted, standing(**fates), earlier=False) is want


def test_singleton_waits_for_earlier_ones_of_its_name() -> None:
    wanted = dependencies.read("singleton")
    assert dependencies.judge(wanted, standing(), earlier=True) is Met.OPEN
    assert dependencies.judge(wanted, standing(), earlier=False) is Met.MET


def test_circles_are_found_and_shown() -> None:
    others = {
        1: dependencies.read("afterok:2"),
        2: dependencies.read("afterany:3:9"),
        4: dependencies.read("afterok:1"),
    }

    def circle(job_id: int, text: str) -> tuple[int, ...]:
        wanted = dependencies.read(text)
        return dependencies.cycle(job_id, wanted, others, lambda ref: [ref.job_id])

    assert circle(3, "afterok:1") == (3, 1, 2, 3)
    assert circle(3, "afterok:3") == (3, 3)
    assert circle(5, "afterok:4") == ()
    assert circle(3, "afterok:slurm:3") == ()
