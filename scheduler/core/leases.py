"""How leases follow Slurm: what its answer means, which jobs are ours, what must be cancelled.

Unknown is never read as ended: a job that Slurm does not name makes its lease UNKNOWN, and the lease
ends only when Slurm states a final state, or has not named it for several polls and its agent is
silent as well. Nothing here runs while Slurm does not answer.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import actions, replicas, snapshot

CANCEL_AGAIN_S = 30.0  # KillWait's default: by then a cancelled job is gone, or the cancel was lost


class Settings(Protocol):
    """What following leases needs to be told."""

    @property
    def absent_polls(self) -> int:
        """Polls without a job before its absence counts."""
        ...

    @property
    def agent_silent_s(self) -> float:
        """Seconds after which an agent counts as silent."""
        ...

    @property
    def agent_lost_s(self) -> float:
        """Seconds of silence after which a lease is given back."""
        ...

    @property
    def agent_connect_s(self) -> float:
        """Seconds within which the agent of a running lease must come."""
        ...

    @property
    def drain_s(self) -> float:
        """Seconds that a closing lease's replicas may drain."""
        ...


def follow(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.Action]:
    """Yield what must be written down, adopted, given back or cancelled by Slurm's newest answer."""
    if snap.jobs is None:
        return
    stamped = _stamped(snap.jobs, snap.cluster)
    by_id = {job.job_id: job for job in snap.jobs}
    busy = {
        known.replica.lease_id
        for known in snap.replicas
        if known.replica.stats is not None and known.replica.stats.interactive
    }
    for held in snap.leases:
        job = by_id.get(ids.SlurmJobId(held.lease.slurm_job_id)) or stamped.get(held.lease.lease_id)
        yield from _news(held, job, settings)
        if not snap.settling:
            yield from _agentless(held, settings)
        if job is not None and held.lease.state is fleet.LeaseState.CLOSING:
            # Batch aborts at once: where nobody streams, nothing is drained.
            drains = held.lease.kind is not fleet.LeaseKind.BACKFILL or held.lease.lease_id in busy
            left_s = settings.drain_s if drains else settings.agent_silent_s
            patience_s = settings.agent_silent_s + left_s
            yield from _cancel(held, job, snap.cancels, patience_s, settings)
    known = {held.lease.lease_id for held in snap.leases}
    for lease_id, job in stamped.items():
        if lease_id in known or job.state.final:
            continue
        if lease_id not in snap.ended:
            if job.state is not slurm.JobState.UNKNOWN:  # it may be over as well as run
                why = f"job {job.job_id} bears our stamp of {lease_id}"
                yield actions.AdoptLease(job, why)
        elif snap.cancels.get(job.job_id, CANCEL_AGAIN_S) >= CANCEL_AGAIN_S:
            why = f"lease {lease_id} has ended and been replaced, its job {job.job_id} has not"
            yield actions.CancelJob(lease_id, job.job_id, why)


def ours(
    jobs: Iterable[slurm.Job], users: Collection[str], cluster: str
) -> tuple[tuple[slurm.Job, ...], tuple[slurm.Job, ...]]:
    """Return the jobs of Forebay's own users, and the open ones of others that bear this cluster's stamp.

    A comment is anybody's to write and to copy, and numbers begin anew where a controller lost its state:
    neither makes somebody else's job a lease, to be followed, booked or cancelled.
    """
    mine, forged = [], []
    for job in jobs:
        if job.user in users:
            mine.append(job)
        elif job.stamp is not None and job.stamp.cluster == cluster and not job.state.final:
            forged.append(job)
    return tuple(mine), tuple(forged)


def silent(held: snapshot.HeldLease, settings: Settings) -> bool:
    """Return whether the lease's agent says nothing, or never came."""
    return held.silent_s is None or held.silent_s > settings.agent_silent_s


def _stamped(jobs: tuple[slurm.Job, ...], cluster: str) -> dict[ids.LeaseId, slurm.Job]:
    """Return the job of each of this cluster's leases; an open job goes before an ended one."""
    found: dict[ids.LeaseId, slurm.Job] = {}
    for job in jobs:
        if job.stamp is None or job.stamp.cluster != cluster:
            continue
        other = found.get(job.stamp.lease_id)
        if other is None or other.state.final:
            found[job.stamp.lease_id] = job
    return found


def _news(
    held: snapshot.HeldLease, job: slurm.Job | None, settings: Settings
) -> Iterator[actions.Action]:
    lease = held.lease
    if not held.fresh:
        return  # Slurm's answer is older than what we know
    if job is not None:
        event = replicas.of_job(job.state)
        if event is None or not replicas.lease_lists(lease.state, event):
            return
        # Slurm's word for "no reason" is None.
        why = "" if job.reason in {"", "None"} else f" ({job.reason})"
        reason = f"Slurm: job {job.job_id} {job.state}{why}"
        yield actions.FollowLease(lease.lease_id, event, job, reason)
        return
    if replicas.lease_lists(lease.state, replicas.LeaseEvent.VANISHED) and held.absent_polls:
        reason = f"Slurm does not name job {lease.slurm_job_id}: unknown, not ended"
        yield actions.FollowLease(lease.lease_id, replicas.LeaseEvent.VANISHED, None, reason)
        return
    if lease.state in {fleet.LeaseState.PENDING, fleet.LeaseState.RUNNING}:
        return
    if held.absent_polls >= settings.absent_polls and silent(held, settings):
        what = (
            "the submission never arrived" if not lease.slurm_job_id else "its agent is silent too"
        )
        reason = f"Slurm did not name it in {held.absent_polls} polls and {what}"
        yield actions.FollowLease(lease.lease_id, replicas.LeaseEvent.ENDED, None, reason)


def _agentless(held: snapshot.HeldLease, settings: Settings) -> Iterator[actions.Action]:
    if held.lease.state is not fleet.LeaseState.RUNNING:
        return
    lease_id = held.lease.lease_id
    if held.silent_s is None:
        if held.held_s > settings.agent_connect_s:
            reason = f"no agent came within {settings.agent_connect_s:g} s: see the lease's log"
            yield actions.CloseLease(lease_id, reason)
    elif held.silent_s > settings.agent_lost_s:
        yield actions.CloseLease(lease_id, f"agent silent for {held.silent_s:.0f} s")


def _cancel(
    held: snapshot.HeldLease,
    job: slurm.Job,
    cancels: Mapping[ids.SlurmJobId, float],
    patience_s: float,
    settings: Settings,
) -> Iterator[actions.Action]:
    """Cancel a closing lease's job once its agent had the time to leave, or if there is none."""
    if job.state.final or cancels.get(job.job_id, CANCEL_AGAIN_S) < CANCEL_AGAIN_S:
        return
    if silent(held, settings):
        yield actions.CancelJob(held.lease.lease_id, job.job_id, "given back; no agent to end it")
    elif held.held_s > patience_s:
        reason = f"given back; its agent has not left within {held.held_s:.0f} s"
        yield actions.CancelJob(held.lease.lease_id, job.job_id, reason)
