"""`--dependency`: read, and judged by the states of the jobs that it names. Pure.

``afterok:12:13,afterany:14`` (all of them) or ``afterok:12?afternotok:13`` (one of them), never both.
``12_3`` is a task of an array, ``12`` of an array all its tasks, ``slurm:4711`` a job of the Slurm cluster.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping

from scheduler.core import batch_order

Met = batch_order.Dependency
_JOB = re.compile(r"(\d{1,9})(?:_(\d{1,9}))?", re.ASCII)
SINGLETON = "singleton"


class DependencyError(ValueError):
    """A dependency that can't be read, or could never be."""


class Kind(enum.StrEnum):
    """What is waited for."""

    AFTER = "after"  # they have started, or were cancelled
    AFTEROK = "afterok"
    AFTERANY = "afterany"
    AFTERNOTOK = "afternotok"


class Fate(enum.Enum):
    """How a job stands, as a dependency sees it."""

    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"
    NOT_OK = "not ok"
    UNKNOWN = "unknown"  # nobody can tell now


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """A job: one of ours, a task of an array, or one of Slurm's."""

    job_id: int
    task: int | None = None
    slurm: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One kind with its jobs; no jobs: singleton."""

    kind: Kind | None
    refs: tuple[Ref, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a job waits for."""

    terms: tuple[Term, ...] = ()
    any_of: bool = False

    @property
    def refs(self) -> tuple[Ref, ...]:
        """All jobs that it names."""
        return tuple(ref for term in self.terms for ref in term.refs)


def read(text: str) -> Wanted:
    """Read a dependency.

    Raises:
        DependencyError: what is wrong with it.
    """
    if not text:
        return Wanted()
    if "," in text and "?" in text:
        raise DependencyError("',' (all of them) and '?' (one of them) can't be mixed")
    any_of = "?" in text
    return Wanted(tuple(_term(part) for part in text.split("?" if any_of else ",")), any_of)


def _term(text: str) -> Term:
    word, *names = text.strip().split(":")
    if word == SINGLETON and not names:
        return Term(None)
    try:
        kind = Kind(word)
    except ValueError:
        known = ", ".join([*Kind, SINGLETON])
        raise DependencyError(f"{word[:40]!r} is no kind: use one of {known}") from None
    refs = []
    slurm = False
    for name in names:
        if name == "slurm" and not slurm:
            slurm = True
            continue
        match = _JOB.fullmatch(name)
        if match is None or (slurm and match[2]):
            raise DependencyError(f"{name[:40]!r} in {text[:80]!r} is no job id: as in {kind}:12")
        refs.append(Ref(int(match[1]), int(match[2]) if match[2] else None, slurm))
        slurm = False
    if not refs or slurm:
        raise DependencyError(f"{text[:80]!r} names no job: as in {kind}:12, {kind}:slurm:4711")
    return Term(kind, tuple(refs))


def judge(wanted: Wanted, fates: Callable[[Ref], Iterable[Fate]], earlier: bool) -> Met:
    """Say what a dependency comes to.

    Args:
        wanted: the dependency.
        fates: how the jobs behind a reference stand.
        earlier: an earlier job of the same user and name has not ended, for singleton.
    """
    if not wanted.terms:
        return Met.MET
    found = [_judge(term, fates, earlier) for term in wanted.terms]
    if wanted.any_of:
        if Met.MET in found:
            return Met.MET
        return Met.OPEN if Met.OPEN in found else Met.NEVER
    if Met.NEVER in found:
        return Met.NEVER
    return Met.OPEN if Met.OPEN in found else Met.MET


def _judge(term: Term, fates: Callable[[Ref], Iterable[Fate]], earlier: bool) -> Met:
    if term.kind is None:
        return Met.OPEN if earlier else Met.MET
    if term.kind is Kind.AFTERNOTOK:
        found = [_failed(set(fates(ref))) for ref in term.refs]
    else:
        found = [_MET[term.kind].get(fate, Met.OPEN) for ref in term.refs for fate in fates(ref)]
    if Met.NEVER in found:
        return Met.NEVER
    return Met.OPEN if Met.OPEN in found else Met.MET


_MET: Mapping[Kind, Mapping[Fate, Met]] = {
    Kind.AFTER: {Fate.RUNNING: Met.MET, Fate.OK: Met.MET, Fate.NOT_OK: Met.MET},
    Kind.AFTERANY: {Fate.OK: Met.MET, Fate.NOT_OK: Met.MET},
    Kind.AFTEROK: {Fate.OK: Met.MET, Fate.NOT_OK: Met.NEVER},
}


def _failed(found: set[Fate]) -> Met:
    """Judge afternotok for one job, or for all tasks of an array: one that failed is enough."""
    if not found or found - {Fate.OK, Fate.NOT_OK}:
        return Met.OPEN
    return Met.MET if Fate.NOT_OK in found else Met.NEVER


def cycle(
    job_id: int,
    wanted: Wanted,
    others: Mapping[int, Wanted],
    meant: Callable[[Ref], Iterable[int]],
) -> tuple[int, ...]:
    """Return the ids of a circle that a job's new dependency would close, or ().

    Args:
        job_id: the job.
        wanted: its new dependency.
        others: those of all jobs that have not ended.
        meant: which of these jobs a reference names: of an array all tasks.
    """
    came_from: dict[int, int] = {}
    todo = [(each, job_id) for each in _meant(wanted, meant)]
    while todo:
        at, before = todo.pop()
        if at == job_id:
            path = [job_id, before]
            while path[-1] != job_id:
                path.append(came_from[path[-1]])
            return tuple(reversed(path))
        if at in came_from:
            continue
        came_from[at] = before
        todo += [(each, at) for each in _meant(others.get(at, Wanted()), meant)]
    return ()


def _meant(wanted: Wanted, meant: Callable[[Ref], Iterable[int]]) -> Iterable[int]:
    return (each for ref in wanted.refs if not ref.slurm for each in meant(ref))
