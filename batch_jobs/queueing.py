"""The queue of batch jobs: gathers what `scheduler.core.batch_order` decides by. Calls block.

What teams have used and how Slurm's jobs stand is looked up again every few seconds; a job that has ended
stays so, and is asked for once.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from batch_jobs import dependencies, model, settings
from batch_jobs import store as stores
from scheduler.core import batch_order

_LOG = logging.getLogger(__name__)
_FRESH_US = 5_000_000
_HALF_LIVES = 10  # after so many a thousandth is left
_DAY_US = 86_400_000_000

SlurmFates = Callable[[Sequence[int]], Mapping[int, dependencies.Fate]]
"""Says how jobs of the Slurm cluster stand; raises OSError where it can't be asked."""


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
        self.usage: dict[str, float] = {}
        self.tokens_per_s = 0.0
        self._looked_us = -_FRESH_US
        self._ended: dict[int, model.BatchJob] = {}
        self._theirs: dict[int, dependencies.Fate] = {}

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

    def jobs(self, jobs: Sequence[model.BatchJob], now_us: int) -> list[batch_order.Job]:
        """Return active jobs as their order depends on them."""
        wanted = {job.job_id: _wanted(job) for job in jobs if job.state is model.State.PENDING}
        if now_us - self._looked_us >= _FRESH_US:
            self._look(wanted.values(), now_us)
        known = {job.job_id: job for job in jobs}
        self._remember(wanted.values(), known)
        return [
            order_of(job, self._judge(job, wanted.get(job.job_id), jobs, known)) for job in jobs
        ]

    def _look(self, wanted: Iterable[dependencies.Wanted], now_us: int) -> None:
        since = now_us - int(_HALF_LIVES * self._half_life_s * 1_000_000)
        had = self._store.had(since)
        self.usage = {}
        for team, tokens, _, ended_us in had:
            age_s = (now_us - (ended_us or now_us)) / 1_000_000
            left = batch_order.decayed(tokens, age_s, self._half_life_s)
            self.usage[team] = self.usage.get(team, 0.0) + left
        day = [
            (n, start, end or now_us)
            for _, n, start, end in had
            if (end or now_us) > now_us - _DAY_US
        ]
        self.tokens_per_s = batch_order.throughput(day)
        self._looked_us = now_us
        ids = sorted({ref.job_id for each in wanted for ref in each.refs if ref.slurm})
        if ids and self._slurm is not None:
            try:
                self._theirs.update(self._slurm(ids))
            except OSError as error:
                _LOG.warning(
                    "Slurm's jobs can't be looked up, who waits for them waits on: %s", error
                )

    def _remember(
        self, wanted: Iterable[dependencies.Wanted], known: Mapping[int, model.BatchJob]
    ) -> None:
        """Fetch the jobs that are waited for and have ended."""
        missing = {
            ref.job_id
            for each in wanted
            for ref in each.refs
            if not ref.slurm and ref.job_id not in known and ref.job_id not in self._ended
        }
        if missing:
            for job in self._store.fates(sorted(missing)):
                if job.state.final:
                    self._ended[job.job_id] = job

    def _judge(
        self,
        job: model.BatchJob,
        wanted: dependencies.Wanted | None,
        jobs: Sequence[model.BatchJob],
        known: Mapping[int, model.BatchJob],
    ) -> dependencies.Met:
        if wanted is None or not wanted.terms:
            return dependencies.Met.MET
        earlier = any(
            (each.user, each.team, each.name) == (job.user, job.team, job.name)
            and each.job_id < job.job_id
            for each in jobs
        )

        def fates(ref: dependencies.Ref) -> Iterable[dependencies.Fate]:
            if ref.slurm:
                return [self._theirs.get(ref.job_id, dependencies.Fate.UNKNOWN)]
            return self._fates(ref, known)

        return dependencies.judge(wanted, fates, earlier)

    def _fates(
        self, ref: dependencies.Ref, known: Mapping[int, model.BatchJob]
    ) -> list[dependencies.Fate]:
        every = [*known.values(), *self._ended.values()]
        found = [job for job in every if ref.job_id in (job.array_id, job.job_id)]
        if ref.task is not None:
            found = [job for job in found if job.array_task == ref.task]
        return [fate_of(job) for job in found] or [dependencies.Fate.UNKNOWN]


def _wanted(job: model.BatchJob) -> dependencies.Wanted:
    return dependencies.read(job.dependency)


def fate_of(job: model.BatchJob) -> dependencies.Fate:
    """Return how a job stands as a dependency: good only if every line succeeded."""
    if job.state is model.State.PENDING:
        return dependencies.Fate.WAITING
    if not job.state.final:
        return dependencies.Fate.RUNNING
    good = job.state is model.State.COMPLETED and not job.counts.failed
    return dependencies.Fate.OK if good else dependencies.Fate.NOT_OK


def order_of(job: model.BatchJob, met: dependencies.Met) -> batch_order.Job:
    """Return a job as its order depends on it."""
    used = job.used.prompt_tokens + job.used.output_tokens
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
        left_tokens=max(0, job.queued_tokens - used),
    )
