"""An in-memory Slurm that obeys the port's contract; tests make it slow, silent, forgetful or gone."""

import dataclasses
from collections.abc import Iterable, Mapping

from scheduler.contracts import clock, ids, slurm


class FakeSlurm:
    """Jobs in a dict. `auto` starts what is submitted at the next `jobs()`.

    Attributes:
        down: every call raises `SlurmUnavailable`.
        hidden: job ids that `jobs()` does not name.
        uncertain: the next submission is kept and answered with `SubmitUncertain`.
        lost: the next submission is dropped and answered with `SubmitUncertain`.
        refuse: why the next submission is refused, or "".
    """

    kind = "fake"
    excludes = True
    users = frozenset({"forebay"})

    def __init__(self, time: clock.Clock, *, cluster: str = "alpha", auto: bool = True) -> None:
        self.time = time
        self.cluster = cluster
        self.auto = auto
        self.down = False
        self.hidden: set[str] = set()
        self.uncertain = False
        self.lost = False
        self.refuse = ""
        self.submitted: list[slurm.JobSpec] = []
        self.cancelled: list[str] = []
        self.reserved: tuple[slurm.Reservation, ...] = ()
        self.people: tuple[slurm.Association, ...] | None = None
        self._jobs: dict[ids.SlurmJobId, slurm.Job] = {}
        self._next = 100

    def versions(self) -> slurm.Versions:
        """Say that client and controller are the fake."""
        self._answer()
        return slurm.Versions("fake", "fake")

    def submit(self, spec: slurm.JobSpec) -> slurm.Submitted:
        """Queue a job."""
        self._answer()
        if self.refuse:
            why, self.refuse = self.refuse, ""
            raise slurm.SlurmRefused(why)
        self.submitted.append(spec)
        if self.lost:
            self.lost = False
            raise slurm.SubmitUncertain("no answer to the submission")
        job = self.add(spec)
        if self.uncertain:
            self.uncertain = False
            raise slurm.SubmitUncertain("no answer to the submission")
        return slurm.Submitted(job.job_id, self.cluster)

    def cancel(self, job_id: ids.SlurmJobId, *, signal: str = "") -> None:
        """End a job."""
        self._answer()
        self.cancelled.append(job_id)
        job = self._jobs.get(job_id)
        if job is not None and not job.state.final and not signal:
            self.end(job_id, slurm.JobState.CANCELLED)

    def update(
        self, job_id: ids.SlurmJobId, *, time_limit_s: int | None = None, comment: str | None = None
    ) -> None:
        """Change a job's limit or comment."""
        self._answer()
        job = self._jobs[job_id]
        self._jobs[job_id] = dataclasses.replace(
            job,
            time_limit_s=job.time_limit_s if time_limit_s is None else time_limit_s,
            comment=job.comment if comment is None else comment,
        )

    def jobs(self) -> tuple[slurm.Job, ...]:
        """List what is not hidden."""
        self._answer()
        if self.auto:
            self.start_all()
        return tuple(job for job in self._jobs.values() if job.job_id not in self.hidden)

    def states(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, slurm.JobState]:
        """Return a state for each id, UNKNOWN where hidden."""
        named = {job.job_id: job.state for job in self.jobs()}
        return {job_id: named.get(job_id, slurm.JobState.UNKNOWN) for job_id in job_ids}

    def nodes(self) -> tuple[slurm.Node, ...]:
        """List two nodes of four GPUs."""
        self._answer()
        return tuple(
            slurm.Node(name, "idle", frozenset(), True, ("serve",), 4, 4) for name in ("n1", "n2")
        )

    def partitions(self) -> tuple[slurm.Partition, ...]:
        """List one partition."""
        self._answer()
        return (slurm.Partition("serve", True, ("n1", "n2"), None),)

    def reservations(self) -> tuple[slurm.Reservation, ...]:
        """List what a test has reserved."""
        self._answer()
        return self.reserved

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        """Return one run of a job that has begun."""
        self._answer()
        job = self._jobs[job_id]
        elapsed = max(0, (job.ended_us or self.time.wall_us()) - job.started_us) // 1_000_000
        return (
            slurm.JobRun(job_id, 0, job.state, job.started_us, job.ended_us, elapsed, job.gpus),
        )

    def associations(self) -> tuple[slurm.Association, ...]:
        """Return `people`, or say that accounting is off."""
        self._answer()
        if self.people is None:
            raise slurm.AccountingOff("accounting_storage/none")
        return self.people

    def config(self) -> Mapping[str, str]:
        """Return nothing of note."""
        self._answer()
        return {"ClusterName": self.cluster}

    def add(self, spec: slurm.JobSpec) -> slurm.Job:
        """Put a job into the queue as if it had been submitted."""
        job = slurm.Job(
            job_id=ids.SlurmJobId(str(self._next)),
            cluster=self.cluster,
            name=spec.name,
            user="forebay",
            account=spec.account,
            partition="serve",
            state=slurm.JobState.PENDING,
            reason="Resources",
            stamp=spec.stamp,
            gpus=spec.gpus_per_node,
            submitted_us=self.time.wall_us(),
            time_limit_s=spec.time_limit_s,
        )
        self._next += 1
        self._jobs[job.job_id] = job
        return job

    def start_all(self) -> None:
        """Start every pending job, each on a node of its own name."""
        for job in list(self._jobs.values()):
            if job.state is slurm.JobState.PENDING:
                self._jobs[job.job_id] = dataclasses.replace(
                    job,
                    state=slurm.JobState.RUNNING,
                    reason="",
                    nodes=(f"n{int(job.job_id) - 99}",),
                    started_us=self.time.wall_us(),
                )

    def end(self, job_id: str, state: slurm.JobState) -> None:
        """End a job behind everybody's back."""
        key = ids.SlurmJobId(job_id)
        self._jobs[key] = dataclasses.replace(
            self._jobs[key], state=state, ended_us=self.time.wall_us()
        )

    def job_of(self, lease_id: str) -> slurm.Job:
        """Return the newest job that bears a lease's stamp."""
        return next(
            job
            for job in reversed(self._jobs.values())
            if job.stamp is not None and job.stamp.lease_id == lease_id
        )

    def _answer(self) -> None:
        if self.down:
            raise slurm.SlurmUnavailable("slurmctld does not answer: start it")
