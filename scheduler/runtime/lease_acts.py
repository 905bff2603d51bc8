"""What is done about leases: asked of Slurm, adopted, followed, given back, cancelled.

Calls to Slurm run beside the tick, one task for each, so that a slow controller delays no role change. Slurm
knows no epochs: a leader asks the registry whether it still is one right before it tells Slurm anything, and
what a leader that was stopped between the two has done is found by its stamp (`core.leases`).
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from sqlalchemy import exc

from scheduler.contracts import clock, fleet, ids, slurm
from scheduler.core import actions, backoff, replicas
from scheduler.runtime import entries, live, settings, writeoff, writer
from scheduler.runtime.registry import database

log = logging.getLogger(__name__)
LeaseRenderer = Callable[[fleet.Lease], slurm.JobSpec]
T = TypeVar("T")
SLURM_THREADS = 4
# A serve lease is submitted when the backfill leases that give way have left, so long after at the latest.
# Slurm would preempt them at once otherwise, and slurmd sees the end of a job that it was told to kill only
# when it looks: after 0.02, 0.07, 0.17, 0.67, 1.67 s and so on (22.05, measured). One that has ended by
# itself frees its GPUs at once.
GIVE_WAY_S = 2.0
LEASE_PAUSES = 12  # the longest pause between asks is so many times the first


class LeaseActs:
    """The applier's hands for leases."""

    def __init__(
        self,
        picture: live.Live,
        writes: writer.Writer,
        port: slurm.SlurmPort,
        renderer: LeaseRenderer,
        options: settings.Settings,
        time: clock.Clock,
    ) -> None:
        self._live = picture
        self._writes = writes
        self._port = port
        self._renderer = renderer
        self._options = options
        self._time = time
        self._tasks: set[asyncio.Task[None]] = set()
        # Own threads: a controller that hangs must not take those that write the registry.
        self._threads = futures.ThreadPoolExecutor(SLURM_THREADS, "slurm")

    async def close(self, seconds: float) -> None:
        """Give calls to Slurm so long to end; a submission cut short is found by its stamp."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
        for task in set(self._tasks):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def settle(self) -> None:
        """Wait until every call to Slurm that was begun has ended."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def request_lease(self, action: actions.RequestLease) -> None:
        """Write a lease down, then submit its job."""
        options = self._options
        lease = fleet.Lease(
            lease_id=ids.LeaseId(ids.short_id("l")),
            cluster=self._live.cluster,
            kind=action.kind,
            team=action.team or options.lease_team,
            state=fleet.LeaseState.REQUESTED,
            gpus=action.gpus,
            gres_type=action.hardware.gres_type or options.lease_gres_type,
            hardware=action.hardware,
            partition=options.lease_partition,
            walltime_s=action.walltime_s or options.lease_walltime_s,
            requested_us=self._time.wall_us(),
            reason=action.reason,
            whole_nodes=action.nodes,
            time_min_s=action.time_min_s,
            exclude=action.exclude,
        )
        await self._writes.save_lease(lease)
        now = self._time.monotonic()
        self._live.leases[lease.lease_id] = entries.LeaseEntry(
            lease, since=now, idle_since=now, submitting=True, asked=now
        )
        self._begin(self._submit(lease))

    async def _submit(self, lease: fleet.Lease) -> None:
        """Submit a lease's job; what came of it is written to the lease."""
        try:
            spec = self._renderer(lease)
            await self._given_way(lease)
            sent = await self._call(lambda: self._port.submit(spec))
        except database.Fenced as error:
            log.warning("lease %s not submitted: %s", lease.lease_id, error)
            return  # the next leader has it in its books, and gives it up
        except exc.SQLAlchemyError as error:
            # Who can't read who leads doesn't act: the planner gives the lease up and asks anew.
            log.warning(
                "lease %s not submitted: registry does not answer: %s", lease.lease_id, error
            )
            changed = dataclasses.replace(lease, reason="not submitted: registry does not answer")
        except (slurm.SubmitUncertain, slurm.SlurmTimeout, slurm.SlurmGarbled) as error:
            # It may be in Slurm's queue: the planner finds it by its stamp, or gives it up.
            log.warning("lease %s: submission uncertain: %s", lease.lease_id, error)
            changed = dataclasses.replace(lease, reason=f"submission uncertain: {error}")
        except slurm.SlurmError as error:
            changed = self._refused(lease, str(error))
        except Exception as error:
            # A fault of the script's renderer must not leave the lease waiting for ever.
            log.exception("lease %s: its script could not be made", lease.lease_id)
            changed = self._refused(lease, f"its script could not be made: {error}")
        else:
            changed = dataclasses.replace(
                lease,
                state=replicas.lease_after(lease.state, replicas.LeaseEvent.QUEUED),
                slurm_job_id=sent.job_id,
                walltime_s=spec.time_limit_s,
                reason="submitted",
            )
        await self._submitted(lease.lease_id, changed)

    async def _given_way(self, lease: fleet.Lease) -> None:
        """Wait until the agents of backfill leases that close have said farewell, `GIVE_WAY_S` at most."""
        if lease.kind is not fleet.LeaseKind.SERVE or not self._closing():
            return
        late = asyncio.ensure_future(self._time.sleep(GIVE_WAY_S))
        try:
            while not late.done():
                rung = self._live.heard.current()
                if not self._closing():
                    return
                heard = asyncio.ensure_future(rung.wait())
                try:
                    await asyncio.wait({heard, late}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    heard.cancel()
        finally:
            late.cancel()

    def _closing(self) -> bool:
        return any(
            entry.lease.kind is fleet.LeaseKind.BACKFILL
            and entry.lease.state is fleet.LeaseState.CLOSING
            and entry.connection is not None
            for entry in self._live.leases.values()
        )

    async def _submitted(self, lease_id: ids.LeaseId, changed: fleet.Lease) -> None:
        entry = self._live.leases.get(lease_id)
        if entry is None:
            return
        entry.submitting = False
        if entry.lease.state is not fleet.LeaseState.REQUESTED:
            # Its agent was faster than the answer: keep the state, take the job id.
            changed = dataclasses.replace(entry.lease, slurm_job_id=changed.slurm_job_id)
        self._live.change_lease(changed, self._time.monotonic())
        self._live.news_leases[lease_id] = changed

    def _refused(self, lease: fleet.Lease, why: str) -> fleet.Lease:
        log.warning("lease %s refused: %s", lease.lease_id, why)
        self._pause_leases(why)
        return dataclasses.replace(
            lease,
            state=replicas.lease_after(lease.state, replicas.LeaseEvent.ENDED),
            ended_us=self._time.wall_us(),
            reason=why,
        )

    def _pause_leases(self, why: str) -> None:
        first = self._options.lease_backoff_s
        self._live.lease_pause = backoff.failed(
            self._live.lease_pause,
            self._time.monotonic(),
            why,
            first_s=first,
            most_s=first * LEASE_PAUSES,
        )

    async def adopt_lease(self, action: actions.AdoptLease) -> None:
        """Take a running job that bears our stamp."""
        job = action.job
        stamp = job.stamp
        if stamp is None or stamp.lease_id in self._live.leases:
            raise writer.Stale("it is known by now")
        event = replicas.of_job(job.state) or replicas.LeaseEvent.RAN
        lease = fleet.Lease(
            lease_id=stamp.lease_id,
            cluster=stamp.cluster,
            kind=fleet.LeaseKind(stamp.kind),
            team=stamp.team,
            state=replicas.lease_after(fleet.LeaseState.REQUESTED, event),
            gpus=job.gpus or 0,
            whole_nodes=len(job.nodes) if len(job.nodes) > 1 else 0,
            partition=job.partition,
            slurm_job_id=job.job_id,
            nodes=job.nodes,
            walltime_s=job.time_limit_s,
            requested_us=job.submitted_us,
            started_us=job.started_us,
            reason=action.reason,
        )
        await self._writes.save_lease(lease)
        now = self._time.monotonic()
        self._live.leases[lease.lease_id] = entries.LeaseEntry(lease, since=now, idle_since=now)
        self._live.wished()

    async def follow_lease(self, action: actions.FollowLease) -> None:
        """Write down what Slurm says of a lease."""
        entry = self._writes.lease(action.lease_id)
        lease = entry.lease
        try:
            state = replicas.lease_after(lease.state, action.event)
        except replicas.UnlistedEvent as error:
            raise writer.Stale(str(error)) from error
        job = action.job
        changed = dataclasses.replace(lease, state=state, reason=action.reason)
        if job is not None:
            changed = dataclasses.replace(
                changed,
                slurm_job_id=job.job_id,
                nodes=job.nodes or lease.nodes,
                started_us=job.started_us or lease.started_us,
            )
        if state is fleet.LeaseState.ENDED:
            now = self._time.monotonic()
            if job is not None and writeoff.lost(entry, job, now, self._options.agent_silent_s):
                await writeoff.write(self._writes.write_off, entry, job, self._time)
            ended_us = job.ended_us if job is not None and job.ended_us else self._time.wall_us()
            changed = dataclasses.replace(changed, ended_us=ended_us)
            if entry.seen is None and lease.state is not fleet.LeaseState.CLOSING:
                self._pause_leases(f"lease {lease.lease_id} ended before its agent came")
        await self._writes.save_lease(changed)
        if state is fleet.LeaseState.RUNNING:
            entry.idle_since = self._time.monotonic()
        self._live.change_lease(changed, self._time.monotonic())

    async def close_lease(self, action: actions.CloseLease) -> None:
        """Tell a lease's agent to close everything and leave."""
        entry = self._writes.lease(action.lease_id)
        if not replicas.lease_lists(entry.lease.state, replicas.LeaseEvent.CLOSED):
            raise writer.Stale(f"it is {entry.lease.state}")
        changed = dataclasses.replace(
            entry.lease, state=fleet.LeaseState.CLOSING, reason=action.reason
        )
        await self._writes.save_lease(changed)
        await self._writes.wish(entry)
        self._live.change_lease(changed, self._time.monotonic())

    async def cancel_job(self, action: actions.CancelJob) -> None:
        """Cancel a lease's job."""
        self._live.cancels[action.job_id] = self._time.monotonic()
        self._begin(self._cancel(action.job_id))

    async def _cancel(self, job_id: ids.SlurmJobId) -> None:
        try:
            await self._call(lambda: self._port.cancel(job_id))
        except (slurm.SlurmError, exc.SQLAlchemyError) as error:
            log.warning("job %s: cancel failed, asked again later: %s", job_id, error)
        except database.Fenced as error:
            log.warning("job %s not cancelled: %s", job_id, error)

    async def _call(self, ask: Callable[[], T]) -> T:
        """Tell Slurm something in a thread, if this broker still leads; raises `database.Fenced`."""

        def told() -> T:
            self._writes.confirm()
            return ask()

        return await asyncio.get_running_loop().run_in_executor(self._threads, told)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a call to Slurm failed in an unforeseen way", exc_info=task.exception())
