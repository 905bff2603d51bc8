"""What may be done to a job in the queue, and what a submission may ask of it. Calls block.

Every change is checked here and made by one guarded write; the runner, which alone moves states, sees it
at its next look.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from batch_jobs import dependencies, intake, model, queueing, settings, sites
from batch_jobs import store as stores
from scheduler.contracts import clock as clocks
from scheduler.contracts import errors, requests, times


class Change(pydantic.BaseModel):
    """What `fctl update job` may set."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    priority: int | None = pydantic.Field(None, ge=-10_000, le=1_000_000)
    qos: str | None = pydantic.Field(None, max_length=64)
    name: str | None = pydantic.Field(None, min_length=1, max_length=256)
    comment: str | None = pydantic.Field(None, max_length=4096)
    dependency: str | None = pydantic.Field(None, max_length=4096)
    begin_us: int | None = pydantic.Field(None, ge=0, le=times.LAST_US)
    deadline_us: int | None = pydantic.Field(None, ge=0, le=times.LAST_US)
    time_limit_s: int | None = pydantic.Field(None, ge=0, le=times.LAST_US // 1_000_000)
    array_limit: int | None = pydantic.Field(None, ge=0, le=1_001)


_MOVING = frozenset({"priority", "qos", "dependency", "begin_us"})
_RUNNING_TOO = frozenset({"comment", "deadline_us", "time_limit_s", "array_limit"})


class Acts:
    """Checks and changes."""

    def __init__(
        self,
        store: stores.Store,
        options: settings.BatchJobsSettings,
        clock: clocks.Clock,
        shares: Mapping[str, float],
        site: sites.Site,
    ) -> None:
        self._site = site
        self._queue = queueing.Queue(store, options, shares)
        self._store = store
        self._options = options
        self._clock = clock

    def check(self, job: model.BatchJob, caller: requests.Caller) -> None:
        """Refuse a submission whose place in the queue makes no sense.

        Raises:
            errors.ForebayError: why.
        """
        self._team(job.team, caller)
        self._qos(job.qos)
        self._dependency(job.dependency, caller, 0)
        if job.array_id:
            first = self._store.get(job.array_id)
            if first is None or (first.team, first.user) != (job.team, job.user):
                raise errors.NotFound(f"there is no array {job.array_id}, or it is not yours")
        elif job.array_limit and job.array_task < 0:
            raise errors.BadRequest("array_limit: this is no array", param="array_limit")

    def served(self, named: str) -> Mapping[str, sites.Served] | None:
        """Return the models that there are, None where nobody can tell.

        Args:
            named: the model for lines that name none, or "".

        Raises:
            errors.BadRequest: it is none of them.
        """
        models = self._site.models()
        if named and models is not None and (why := sites.fault(named, models, near=True)):
            raise errors.BadRequest(f"model: {why}", param="model")
        return models

    def _team(self, team: str, caller: requests.Caller) -> None:
        """Refuse a team that nobody knows: its bill would have no reader."""
        if team == caller.team or self._site.teams is None:
            return
        try:
            known = team in self._site.teams()
        except errors.NoReplica as error:
            raise errors.NoReplica(
                f"account {team!r} can't be checked, since Slurm does not answer: try again later"
            ) from error
        if not known:
            raise errors.BadRequest(
                f"account {team!r}: it has no account in Slurm and no API key: check the name",
                param="account",
            )

    def room(self, job: model.BatchJob, tokens: int) -> None:
        """Refuse a submission beyond its team's queued tokens.

        Raises:
            errors.QuotaExceeded: it is.
        """
        most = self._options.team_queued_tokens
        if most and self._store.queued_tokens(job.team) + tokens > most:
            raise errors.QuotaExceeded(
                f"team {job.team} may have {most} tokens queued, this job is estimated to take {tokens} "
                "more: wait until others have ended, or submit less at once"
            )

    def test(self, job: model.BatchJob, report: intake.Report) -> dict[str, Any]:
        """Return what a job would take, and when it would start."""
        now = self._clock.wall_us()
        queue = self._queue
        jobs = list(self._store.active())
        new = dataclasses.replace(
            job, job_id=2**31, submitted_us=now, queued_tokens=report.tokens.all
        )
        begun = queue.decide([*jobs, new], now)
        starts = queue.starts([*jobs, new], now)
        rate = queue.tokens_per_s
        tokens = {name: (both[0], both[1]) for name, both in report.tokens.models.items()}
        gpu_s = sites.gpu_seconds(tokens, self._site.models())
        return {
            "estimate": {
                "prompt_tokens": report.tokens.prompt,
                "output_tokens": report.tokens.output,
                "models": {name: sum(both) for name, both in report.tokens.models.items()},
                "gpu_seconds": None if gpu_s is None else round(gpu_s, 1),
                "cost": self._site.price(tokens) or None,
                "tokens_per_s": round(rate, 1) if rate else None,
                "seconds": round(report.tokens.all / rate, 1) if rate else None,
                "start_us": now if new.job_id in begun.start else starts.get(new.job_id),
            }
        }

    @staticmethod
    def each(act: Callable[[model.BatchJob], None], jobs: Sequence[model.BatchJob]) -> None:
        """Do something to a job, or to every task of an array that it can be done to.

        Raises:
            errors.ForebayError: it could not be done to any.
        """
        fault: errors.ForebayError | None = None
        done = 0
        for job in jobs:
            try:
                act(job)
                done += 1
            except errors.BadRequest as error:
                fault = error
        if fault is not None and not done:
            raise fault

    def placed(self, now_us: int) -> Callable[[model.BatchJob], dict[str, Any]]:
        """Return what tells a job's place in the queue: priority, its team's fair share."""
        jobs = self._store.active()
        ranks = self._queue.decide(jobs, now_us).priority
        share = self._queue.factors({job.team for job in jobs})

        def place(job: model.BatchJob) -> dict[str, Any]:
            factor = share.get(job.team)
            return {
                "rank": ranks.get(job.job_id, job.priority),
                "fairshare": None if factor is None else round(factor, 6),
            }

        return place

    def requeue(self, job: model.BatchJob) -> None:
        """Ask for a running job to be put back.

        Raises:
            errors.BadRequest: it does not run, or was submitted with --no-requeue.
        """
        if not job.requeue:
            raise errors.BadRequest(f"job {job.shown_id} was submitted with --no-requeue")
        if job.state is not model.State.RUNNING:
            raise errors.BadRequest(
                f"job {job.shown_id} is {job.state}: only a running one can be put back"
            )
        self._set(job, {"requeue_us": self._clock.wall_us()}, pending=False)

    def top(self, job: model.BatchJob) -> None:
        """Put a pending job before its user's others.

        Raises:
            errors.BadRequest: it does not wait.
        """
        self._set(job, {"top_us": self._clock.wall_us(), "estimated_us": 0}, pending=True)

    def update(self, job: model.BatchJob, wish: Change, caller: requests.Caller) -> None:
        """Change a job.

        Raises:
            errors.ForebayError: why not.
        """
        values = {name: value for name, value in wish.model_dump().items() if value is not None}
        if not values:
            raise errors.BadRequest("nothing to change: name a field")
        if values.get("priority", job.priority) > max(0, job.priority) and not caller.admin:
            raise errors.Forbidden("only an admin raises a job's priority")
        self._qos(values.get("qos", ""))
        begin = values.get("begin_us", job.begin_us)
        deadline = values.get("deadline_us", 0)
        if deadline and deadline <= max(self._clock.wall_us(), begin):
            raise errors.BadRequest("the deadline has passed, or comes before the begin")
        if "dependency" in values:
            self._dependency(values["dependency"], caller, job.job_id)
        pending = not values.keys() <= _RUNNING_TOO
        if values.keys() & _MOVING:  # what was said of its start no longer holds
            values["estimated_us"] = 0
        self._set(job, values, pending=pending)

    def _set(self, job: model.BatchJob, values: dict[str, Any], *, pending: bool) -> None:
        if not self._store.update(job.job_id, values, pending=pending):
            wanted = "pending" if pending else "active"
            raise errors.BadRequest(f"job {job.shown_id} is not {wanted} any more")

    def _qos(self, name: str) -> None:
        if name and name not in self._options.qos:
            known = ", ".join(sorted(self._options.qos)) or "none, see [batch_jobs] qos"
            raise errors.BadRequest(f"qos {name[:64]!r} is not known here: {known}", param="qos")

    def _dependency(self, text: str, caller: requests.Caller, job_id: int) -> None:
        try:
            wanted = dependencies.read(text)
        except dependencies.DependencyError as error:
            raise errors.BadRequest(f"dependency: {error}", param="dependency") from None
        ours = sorted({ref.job_id for ref in wanted.refs if not ref.slurm})
        found = self._store.fates(ours) if ours else ()
        for ref in wanted.refs:
            if ref.slurm:
                continue
            same = [
                each
                for each in found
                if ref.job_id in (each.job_id, each.array_id)
                and (ref.task is None or each.array_task == ref.task)
                and (caller.admin or each.team == caller.team)
            ]
            if not same:
                shown = f"{ref.job_id}_{ref.task}" if ref.task is not None else str(ref.job_id)
                raise errors.BadRequest(
                    f"dependency: there is no job {shown} of your team", param="dependency"
                )
        if job_id:
            self._no_cycle(job_id, wanted)

    def _no_cycle(self, job_id: int, wanted: dependencies.Wanted) -> None:
        active = self._store.active()
        others = {each.job_id: dependencies.read(each.dependency) for each in active}
        jobs = queueing.by_ref(active)
        circle = dependencies.cycle(
            job_id, wanted, others, lambda ref: [job.job_id for job in queueing.named(ref, jobs)]
        )
        if circle:
            shown = " → ".join(map(str, circle))
            raise errors.BadRequest(
                f"dependency: the jobs would wait for each other: {shown}", param="dependency"
            )
