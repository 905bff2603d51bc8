"""The queue of batch jobs: gathers what `scheduler.core.batch_order` decides by. Calls block.

What teams have used and how Slurm's jobs stand is looked up again every few seconds; a job that has ended
stays so, and is asked for no more. Several threads may ask at once: what is kept between two looks is
replaced as a whole.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from batch_jobs import dependencies, model, settings
from batch_jobs import store as stores
from scheduler.core import batch_order

_LOG = logging.getLogger(__name__)
_FRESH_US = 5_000_000
_HALF_LIVES = 10  # after so many a thousandth is left
_DAY_US = 86_400_000_000
_OVER = frozenset({dependencies.Fate.OK, dependencies.Fate.NOT_OK})

SlurmFates = Callable[[Sequence[int]], Mapping[int, dependencies.Fate]]
"""Says how jobs of the Slurm cluster stand; raises OSError where it can't be asked."""

ByRef = Mapping[int, Sequence[model.BatchJob]]
"""Jobs by what names them in a dependency: their own id, and their array's."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Awaited:
    """What an id that is waited for stood for when it was looked up.

    Attributes:
        active: ids of its jobs that had not ended; once they are others, one has.
        ended: its jobs that had.
    """

    active: frozenset[int]
    ended: Sequence[model.BatchJob]


class Queue:
    """Puts jobs in order.

    Args:
        store: the registry's batch jobs.
        options: the [batch_jobs] table.
        shares: the teams' shares, 1 where one is not named.
        slurm: where Slurm's jobs are looked up; None: nowhere.
    """

    def __init__(
        self,
        store: stores.Store,
        options: settings.BatchJobsSettings,
        shares: Mapping[str, float],
        slurm: SlurmFates | None = None,
    ) -> None:
        self._store = store
        self._half_life_s = options.share_half_life_s
        self._slurm = slurm
        self.rules = options.rules(shares)
        self.usage: Mapping[str, float] = {}
        self.tokens_per_s = 0.0
        self.truth = 1.0  # what jobs took of what was estimated for them
        self._looked_us = -_FRESH_US
        self._awaited: Mapping[int, _Awaited] = {}
        self._theirs: Mapping[int, dependencies.Fate] = {}

    def factors(self, teams: Iterable[str]) -> dict[str, float]:
        """Return the teams' fair-share factors."""
        return batch_order.factors(self.usage, self.rules.shares, teams)

    def decide(self, jobs: Sequence[model.BatchJob], now_us: int) -> batch_order.Decision:
        """Say which pending jobs start now, and why the others wait."""
        return batch_order.decide(self.jobs(jobs, now_us), self.rules, self.usage, now_us)

    def starts(self, jobs: Sequence[model.BatchJob], now_us: int) -> dict[int, int]:
        """Estimate when the pending ones start, UTC µs."""
        found = self.jobs(jobs, now_us)
        return batch_order.starts(found, self.rules, self.usage, now_us, self.tokens_per_s)

    def foretell(self, jobs: Sequence[model.BatchJob], now_us: int) -> None:
        """Keep when jobs that wait are expected to start; the first word stays, to be compared."""
        pending = {job.job_id for job in jobs if job.state is model.State.PENDING}
        found = self.starts(jobs, now_us)
        self._store.expect({job_id: at for job_id, at in found.items() if job_id in pending})

    def jobs(self, jobs: Sequence[model.BatchJob], now_us: int) -> list[batch_order.Job]:
        """Return the jobs that wait or run, as their order depends on them."""
        wanted = {
            job.job_id: dependencies.read(job.dependency)
            for job in jobs
            if job.state is model.State.PENDING and job.dependency
        }
        if now_us - self._looked_us >= _FRESH_US:
            self._look(wanted.values(), now_us)
        met = self._met(wanted, jobs)
        free = dependencies.Met.MET
        # One that is ending runs no line any more: however slow its user's file system, it holds no place.
        return [
            order_of(job, met.get(job.job_id, free), self.truth)
            for job in jobs
            if job.state is not model.State.COMPLETING
        ]

    def _look(self, wanted: Iterable[dependencies.Wanted], now_us: int) -> None:
        since = now_us - int(_HALF_LIVES * self._half_life_s * 1_000_000)
        had = self._store.had(since)
        usage: collections.defaultdict[str, float] = collections.defaultdict(float)
        for each in had:
            age_s = (now_us - (each.ended_us or now_us)) / 1_000_000
            usage[each.team] += batch_order.decayed(each.tokens, age_s, self._half_life_s)
        self.usage = dict(usage)
        day = [each for each in had if (each.ended_us or now_us) > now_us - _DAY_US]
        self.tokens_per_s = batch_order.throughput(
            (each.tokens, each.started_us, each.ended_us or now_us) for each in day
        )
        self.truth = batch_order.truth((each.tokens, each.expected) for each in day)
        self._looked_us = now_us
        self._theirs = self._asked(
            {ref.job_id for each in wanted for ref in each.refs if ref.slurm}
        )

    def _asked(self, ids: set[int]) -> Mapping[int, dependencies.Fate]:
        """Return how Slurm's jobs stand: one that was seen to have ended has, though Slurm forget it."""
        before = self._theirs
        found = {each: before[each] for each in ids & before.keys()}
        left = sorted(each for each in ids if found.get(each) not in _OVER)
        if left and self._slurm is not None:
            try:
                found.update(self._slurm(left))
            except OSError as error:
                _LOG.warning(
                    "Slurm's jobs can't be looked up, who waits for them waits on: %s", error
                )
        return found

    def _met(
        self, wanted: Mapping[int, dependencies.Wanted], jobs: Sequence[model.BatchJob]
    ) -> Mapping[int, dependencies.Met]:
        """Return what the dependencies of jobs that wait come to."""
        if not wanted:
            return {}
        active = by_ref(jobs)
        ended = self._ended(wanted.values(), active)
        theirs = self._theirs
        first: dict[tuple[str, str, str], int] = {}  # the earliest active job of a user and name
        for job in jobs:
            mark = _mark(job)
            first[mark] = min(first.get(mark, job.job_id), job.job_id)

        def fates(ref: dependencies.Ref) -> Sequence[dependencies.Fate]:
            if ref.slurm:
                return [theirs.get(ref.job_id, dependencies.Fate.UNKNOWN)]
            meant = [*named(ref, active), *named(ref, ended)]
            return [fate_of(job) for job in meant] or [dependencies.Fate.UNKNOWN]

        return {
            job.job_id: dependencies.judge(
                wanted[job.job_id], fates, first[_mark(job)] < job.job_id
            )
            for job in jobs
            if job.job_id in wanted
        }

    def _ended(self, wanted: Iterable[dependencies.Wanted], active: ByRef) -> ByRef:
        """Return the jobs that are waited for and have ended, the tasks of an array one by one."""
        refs = {ref.job_id for each in wanted for ref in each.refs if not ref.slurm}
        left = {ref: frozenset(job.job_id for job in active.get(ref, ())) for ref in refs}
        before = self._awaited
        new = sorted(
            ref for ref, ids in left.items() if ref not in before or before[ref].active != ids
        )
        found = by_ref(job for job in self._store.fates(new) if job.state.final) if new else {}
        after = {ref: before[ref] for ref in refs - set(new)}
        after |= {ref: _Awaited(left[ref], found.get(ref, ())) for ref in new}
        self._awaited = after
        return {ref: each.ended for ref, each in after.items()}


def by_ref(jobs: Iterable[model.BatchJob]) -> ByRef:
    """Return jobs by what names them in a dependency."""
    found: dict[int, list[model.BatchJob]] = {}
    for job in jobs:
        for ref in {job.job_id, job.array_id or job.job_id}:
            found.setdefault(ref, []).append(job)
    return found


def named(ref: dependencies.Ref, jobs: ByRef) -> list[model.BatchJob]:
    """Return the jobs that a dependency names: a job, an array's tasks, or one of them."""
    return [
        job for job in jobs.get(ref.job_id, ()) if ref.task is None or job.array_task == ref.task
    ]


def _mark(job: model.BatchJob) -> tuple[str, str, str]:
    return job.team, job.user, job.name


def fate_of(job: model.BatchJob) -> dependencies.Fate:
    """Return how a job stands as a dependency: good only if every line succeeded."""
    if job.state is model.State.PENDING:
        return dependencies.Fate.WAITING
    if not job.state.final:
        return dependencies.Fate.RUNNING
    good = job.state is model.State.COMPLETED and not job.counts.failed
    return dependencies.Fate.OK if good else dependencies.Fate.NOT_OK


def order_of(job: model.BatchJob, met: dependencies.Met, truth: float = 1.0) -> batch_order.Job:
    """Return a job as its order depends on it.

    Args:
        job: the job.
        met: what its dependencies come to.
        truth: the part of the tokens estimated for it that it is likely to take.
    """
    used = job.used.prompt_tokens - job.used.cached_tokens + job.used.output_tokens
    counts = job.counts
    return batch_order.Job(
        job_id=job.job_id,
        team=job.team,
        user=job.user,
        submitted_us=job.submitted_us,
        running=job.state is not model.State.PENDING,
        priority=job.priority,
        qos=job.qos,
        held=job.held,
        begin_us=job.begin_us,
        top_us=job.top_us,
        array_id=job.array_id,
        array_limit=job.array_limit,
        dependency=met,
        left_tokens=batch_order.left(
            used, counts.done, counts.total, round(truth * job.queued_tokens)
        ),
    )
