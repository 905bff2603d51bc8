"""The embedded Slurm: runs leases as local processes, for a laptop, a test, or a machine without root.

It keeps Slurm's manners where Forebay can see them: states, GPU binding, SIGTERM then SIGKILL, time
limits, preemption by partition, accounting of runs. Jobs belong to the folder and not to the process
that opened it: a broker that restarts finds them running.
"""

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from scheduler.contracts import clock as clocks
from scheduler.contracts import ids, slurm
from slurm_plugins import (
    embedded_runner,
    embedded_schedule,
    embedded_store,
    owner,
    sbatch,
    stamp,
)

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_KEPT = 1000  # ended jobs that are remembered, so that the file stays small
VERSION = "embedded-1"
Shape = embedded_schedule.Shape
# Runners that this process started and must reap; they outlive the client that started them.
_runners: list["subprocess.Popen[bytes]"] = []


class EmbeddedClient:
    """`slurm.SlurmPort` without Slurm.

    Args:
        folder: where its state lives; one cluster a folder.
        cluster: the cluster's name.
        shape: the pretend machine.
        kill_wait_s: seconds from SIGTERM to SIGKILL.
        clock: for time limits and records.
    """

    kind = "embedded"
    excludes = True

    def __init__(
        self,
        folder: Path,
        *,
        cluster: str = "embedded",
        shape: embedded_schedule.Shape | None = None,
        kill_wait_s: float = 30.0,
        clock: clocks.Clock | None = None,
    ) -> None:
        self.cluster = cluster
        self.users = owner.names()
        self.shape = shape or embedded_schedule.Shape()
        self.kill_wait_s = kill_wait_s
        self._clock = clock or clocks.SystemClock()
        self._store = embedded_store.Store(folder.absolute())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="embedded-slurm", daemon=True)
        self._begun = threading.Lock()  # taken for good once this client watches

    def close(self) -> None:
        """Stop watching; jobs go on, and the next client of this folder takes over."""
        self._closed.set()
        self._begun.acquire(blocking=False)
        if self._thread.ident is not None:
            self._thread.join()

    def shutdown(self) -> None:
        """End every job and wait until its processes are gone, then close."""
        with self._store.change() as state:
            open_jobs = [ids.SlurmJobId(r.job_id) for r in state.jobs.values() if not r.state.final]
        for job_id in open_jobs:
            self.cancel(job_id)
        deadline = time.monotonic() + self.kill_wait_s + 5
        while self._tick() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 2)
        with self._store.change() as state:
            for record in state.running():
                self._kill(record)
        self._tick()
        self.close()
        end = time.monotonic() + 2
        while _runners and time.monotonic() < end:  # they leave right after their last word
            _reap()
            time.sleep(_POLL_S / 10)

    def versions(self) -> slurm.Versions:
        """Return this module's own version for both sides."""
        return slurm.Versions(client=VERSION, controller=VERSION)

    def submit(self, spec: slurm.JobSpec) -> slurm.Submitted:
        """Queue a job; it starts at once if its GPUs are free."""
        sbatch.check(spec)
        fault = embedded_schedule.fault(spec, self.shape)
        if fault:
            raise slurm.SlurmRefused(f"Batch job submission failed: {fault}")
        with self._store.change() as state:
            job_id = str(state.next_id)
            state.next_id += 1
            state.jobs[job_id] = embedded_store.Record(
                job_id=job_id,
                spec=spec,
                user=owner.name(),
                comment=stamp.render(spec.stamp) if spec.stamp is not None else "",
                time_limit_s=sbatch.minutes(spec.time_limit_s) * 60,
                submitted_us=self._clock.wall_us(),
                reason="None",
            )
            state.forget(_KEPT)
        self._tick()
        return slurm.Submitted(ids.SlurmJobId(job_id), self.cluster)

    def cancel(self, job_id: ids.SlurmJobId, *, signal: str = "") -> None:
        """End a job, or send a signal to all its processes but the batch script."""
        self._begin()
        with self._store.change() as state:
            record = state.jobs.get(job_id)
            if record is None or record.state.final:
                return
            if signal:
                self._signal_steps(record, signal)
            else:
                self._stop(record, slurm.JobState.CANCELLED)

    def update(
        self, job_id: ids.SlurmJobId, *, time_limit_s: int | None = None, comment: str | None = None
    ) -> None:
        """Change a job's walltime or comment."""
        self._begin()
        with self._store.change() as state:
            record = state.jobs.get(job_id)
            if record is None or record.state.final:
                raise slurm.SlurmRefused(f"job {job_id}: Invalid job id specified")
            if time_limit_s is not None:
                record.time_limit_s = sbatch.minutes(time_limit_s) * 60
            if comment is not None:
                record.comment = comment

    def jobs(self) -> tuple[slurm.Job, ...]:
        """List every job that is remembered."""
        self._tick()
        with self._store.change() as state:
            return tuple(self._job(record) for record in state.jobs.values())

    def states(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, slurm.JobState]:
        """Return the states of the jobs asked for."""
        known = {job.job_id: job.state for job in self.jobs()}
        return {job_id: known.get(job_id, slurm.JobState.UNKNOWN) for job_id in job_ids}

    def nodes(self) -> tuple[slurm.Node, ...]:
        """List the pretend nodes."""
        with self._store.change() as state:
            running = state.running()
        found = []
        for name in self.shape.names:
            gpus, cpus = embedded_schedule.free(running, self.shape, name)
            idle = not any(name in record.gpus for record in running)
            found.append(
                slurm.Node(
                    name=name,
                    state="idle" if idle else "mixed" if gpus and cpus else "allocated",
                    flags=frozenset(),
                    usable=True,
                    partitions=self.shape.partitions,
                    gpus=self.shape.gpus,
                    gpus_free=gpus,
                    gres_type=self.shape.gres_type,
                    cpus=self.shape.cpus,
                    cpus_free=cpus,
                )
            )
        return tuple(found)

    def partitions(self) -> tuple[slurm.Partition, ...]:
        """List the partitions; the first has the highest priority."""
        return tuple(
            slurm.Partition(
                name=name,
                up=True,
                nodes=self.shape.names,
                max_time_s=None,
                preempt_mode="OFF" if rank == 0 else "CANCEL",
                priority_tier=len(self.shape.partitions) - rank,
                grace_time_s=0,
            )
            for rank, name in enumerate(self.shape.partitions)
        )

    def reservations(self) -> tuple[slurm.Reservation, ...]:
        """List the reservations that have not ended."""
        with self._store.change() as state:
            now_us = self._clock.wall_us()
            return tuple(kept for kept in state.reservations.values() if kept.ends_us > now_us)

    def reserve(self, reservation: slurm.Reservation) -> None:
        """Keep nodes from a time on, as ``scontrol create reservation`` does; `release` ends it."""
        with self._store.change() as state:
            state.reservations[reservation.name] = reservation

    def release(self, name: str) -> None:
        """Forget a reservation; one that is not there is no error."""
        with self._store.change() as state:
            state.reservations.pop(name, None)

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        """Return the job's run; nothing is requeued here, so there is one at most."""
        self._tick()
        with self._store.change() as state:
            record = state.jobs.get(job_id)
        if record is None or not record.started_us:
            return ()
        until = record.ended_us or self._clock.wall_us()
        return (
            slurm.JobRun(
                job_id=job_id,
                run=0,
                state=record.state,
                started_us=record.started_us,
                ended_us=record.ended_us,
                elapsed_s=max(0, until - record.started_us) // 1_000_000,
                gpus=sum(map(len, record.gpus.values())),
                node_count=len(record.gpus),
                exit_code=record.exit_code,
            ),
        )

    def associations(self) -> tuple[slurm.Association, ...]:
        """Refuse: users and accounts are kept by slurmdbd alone."""
        raise slurm.AccountingOff("the embedded Slurm keeps no associations; use API keys")

    def config(self) -> Mapping[str, str]:
        """Return the few settings that it has, under Slurm's names."""
        return {
            "ClusterName": self.cluster,
            "SLURM_VERSION": VERSION,
            "KillWait": f"{self.kill_wait_s:g} sec",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "CANCEL",
        }

    def _begin(self) -> None:
        """Watch from now on: who asks for jobs looks after them.

        Who asks for the cluster's name alone does not: the rounds would stand in the way of a gateway's
        streams, since two threads of one interpreter take turns.
        """
        if self._begun.acquire(blocking=False):
            self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            try:
                self._tick()
            except (slurm.SlurmError, OSError) as error:
                _log.error("embedded Slurm: %s", error)

    def _tick(self) -> bool:
        """Take note of what ended, enforce limits, start what fits; return whether jobs run."""
        self._begin()
        _reap()
        with self._store.change() as state:
            for record in state.running():
                self._look_after(record)
            decision = embedded_schedule.decide(
                [record for record in state.jobs.values() if not record.state.final],
                self.shape,
                embedded_schedule.Closed(self._clock.wall_us(), tuple(state.reservations.values())),
            )
            for job_id, reason in decision.reasons.items():
                state.jobs[job_id].reason = reason
            for job_id in decision.preempt:
                self._stop(state.jobs[job_id], slurm.JobState.PREEMPTED)
            for start in decision.starts:
                self._start(state.jobs[start.job_id], start)
            return bool(state.running())

    def _look_after(self, record: embedded_store.Record) -> None:
        mark = self._store.job_folder(record.job_id) / "ended.json"
        gone = embedded_runner.start_time(record.runner_pid) != record.runner_start
        ended = embedded_runner.read(mark)  # after the look at the process: it writes, then goes
        if ended is not None:
            record.exit_code = str(ended["exit_code"])
            fallback = "COMPLETED" if record.exit_code == "0:0" else "FAILED"
            record.state = slurm.JobState(record.why or fallback)
            record.reason = str(ended["reason"]) or "None"
            record.ended_us = max(record.started_us, int(ended["ended_us"]))
        elif gone:
            self._kill(record)
            record.state = slurm.JobState(record.why or "NODE_FAIL")
            record.reason = "None" if record.why else "the job's runner died"
            record.ended_us = self._clock.wall_us()
        elif not record.why and (
            self._clock.wall_us() - record.started_us > record.time_limit_s * 1_000_000
        ):
            self._stop(record, slurm.JobState.TIMEOUT)

    def _start(self, record: embedded_store.Record, start: embedded_schedule.Start) -> None:
        folder = self._store.job_folder(record.job_id)
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "script"
        script.write_text(record.spec.script, encoding="utf-8")
        script.chmod(0o700)
        record.gpus = {node: list(indexes) for node, indexes in start.gpus.items()}
        record.partition = start.partition
        embedded_runner.write(
            folder / "plan.json",
            {
                "script": str(script),
                "directory": record.spec.directory,
                "output": embedded_store.output_file(record),
                "environment": embedded_store.environment(record, self.cluster),
                "kill_wait_s": self.kill_wait_s,
            },
        )
        with (folder / "runner.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", embedded_runner.__file__, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": sbatch.DEFAULT_PATH},
                start_new_session=True,
            )
        _runners.append(child)
        record.runner_pid = child.pid
        record.runner_start = embedded_runner.start_time(child.pid)
        record.started_us = self._clock.wall_us()
        record.state = slurm.JobState.RUNNING
        record.reason = "None"

    def _stop(self, record: embedded_store.Record, why: slurm.JobState) -> None:
        record.why = record.why or why.value
        if not record.started_us:
            record.state = slurm.JobState(record.why)
            record.ended_us = self._clock.wall_us()
            return
        record.state = slurm.JobState.COMPLETING
        if embedded_runner.start_time(record.runner_pid) == record.runner_start:
            embedded_runner.send([record.runner_pid], signal.SIGTERM)

    def _signal_steps(self, record: embedded_store.Record, name: str) -> None:
        number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
        mark = embedded_runner.read(self._store.job_folder(record.job_id) / "started.json")
        if mark is not None:
            embedded_runner.send(embedded_runner.descendants(int(mark["pid"])), number)

    def _kill(self, record: embedded_store.Record) -> None:
        """End the script and all below it for good; for a runner that no longer does so itself."""
        mark = embedded_runner.read(self._store.job_folder(record.job_id) / "started.json")
        if mark is None:
            return
        pid = int(mark["pid"])
        if embedded_runner.start_time(pid) == int(mark["start"]):
            embedded_runner.send([*embedded_runner.descendants(pid), pid], signal.SIGKILL)

    def _job(self, record: embedded_store.Record) -> slurm.Job:
        asked = record.spec.gpus_per_node * record.spec.nodes
        return slurm.Job(
            job_id=ids.SlurmJobId(record.job_id),
            cluster=self.cluster,
            name=record.spec.name,
            user=record.user,
            account=record.spec.account,
            partition=record.partition or ",".join(record.spec.partitions),
            state=record.state,
            reason=record.reason,
            comment=record.comment,
            stamp=stamp.parse(record.comment),
            nodes=tuple(record.gpus),
            gpus=sum(map(len, record.gpus.values())) if record.started_us else asked,
            submitted_us=record.submitted_us,
            started_us=record.started_us,
            ended_us=record.ended_us,
            time_limit_s=record.time_limit_s,
            exit_code=record.exit_code,
        )


def _reap() -> None:
    for runner in list(_runners):
        if runner.poll() is not None:
            with contextlib.suppress(ValueError):  # another thread was faster
                _runners.remove(runner)
