"""Rung 3: backfill leases that are taken back because interactive callers need their GPUs.

The broker takes them itself and asks for the new lease at the same time; Slurm's preemption stays behind it.
Batch aborts at once where its agent is told to leave, its lines keep their tokens and go on elsewhere.
"""

from collections.abc import Collection, Iterator

from scheduler.contracts import fleet, ids
from scheduler.core import actions, snapshot


def take_back(
    snap: snapshot.Snapshot,
    wanted_gpus: int,
    stopping: Collection[ids.ReplicaId],
    spoken: Collection[ids.LeaseId] = (),
) -> Iterator[actions.CloseLease]:
    """Close backfill leases until so many GPUs come free, those that this plan has emptied anyway.

    One that has just come for batch is not taken: it would be asked for again in the same plan, and taken
    back as soon as it came, for as long as Slurm does not give the other one.

    Args:
        snap: the picture.
        wanted_gpus: what serve leases have no room for; GPUs of leases that close already count against it.
        stopping: replicas that this plan stops.
        spoken: leases that batch replicas of this plan go to.
    """
    coming = sum(
        held.lease.hardware.whole(held.lease.gpus)
        for held in snap.leases
        if held.lease.kind is fleet.LeaseKind.BACKFILL
        and (held.leaving or held.lease.state is fleet.LeaseState.CLOSING)
    )
    left = wanted_gpus - coming
    inside = {known.replica.lease_id for known in snap.replicas}
    staying = {lease_id for lease_id in spoken if lease_id not in inside} | {
        known.replica.lease_id
        for known in snap.replicas
        if known.run and known.awake and known.replica.replica_id not in stopping
    }
    for held in sorted(snap.leases, key=lambda held: (held.held_s, held.lease.lease_id)):
        lease = held.lease
        if left <= 0:
            return
        mine = lease.kind is fleet.LeaseKind.BACKFILL and not held.leaving
        if mine and lease.state is fleet.LeaseState.RUNNING and lease.lease_id not in staying:
            left -= lease.hardware.whole(lease.gpus)
            reason = f"rung 3: {wanted_gpus} GPUs are wanted by interactive replicas"
            yield actions.CloseLease(lease.lease_id, reason)
