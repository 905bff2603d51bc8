"""Which replicas count towards what is wanted, and how they are told apart."""

import collections
from collections.abc import Mapping

from scheduler.contracts import fleet
from scheduler.core import replicas, snapshot

Key = tuple[str, str]
STUCK_S = 5.0  # rung 1 has one second; an agent that says nothing for so long is silent


def counted(
    snap: snapshot.Snapshot, rolling: frozenset[str] = frozenset()
) -> Mapping[Key, list[snapshot.KnownReplica]]:
    """Return the replicas of each deployment that are told to run, awake, in a lease that stays.

    Args:
        snap: the picture.
        rolling: leases that are being replaced: what is in them does not count any more.
    """
    staying = {
        held.lease.lease_id
        for held in snap.leases
        if held.lease.state in {fleet.LeaseState.RUNNING, fleet.LeaseState.UNKNOWN}
        and not held.leaving
        and held.lease.lease_id not in rolling
    }
    gone = {slot.slot_id for held in snap.leases for slot in held.slots if slot.state.final}
    found: dict[Key, list[snapshot.KnownReplica]] = collections.defaultdict(list)
    for known in snap.replicas:
        replica = known.replica
        if (
            known.run
            and known.awake
            and replica.lease_id in staying
            and replica.slot_id not in gone
            and not replicas.replica_final(replica.state)
        ):
            found[known.key].append(known)
    return found


def serves(known: snapshot.KnownReplica) -> bool:
    """Return whether a replica is told to run and takes requests."""
    return known.run and known.replica.state is fleet.ReplicaState.SERVING


def stuck(known: snapshot.KnownReplica) -> bool:
    """Return whether a batch replica that callers need has not turned in its time: the next rung goes on."""
    told = known.wanted_role is not fleet.Role.BATCH and known.replica.role is fleet.Role.BATCH
    return told and serves(known) and known.told_s > STUCK_S


def kinds(snap: snapshot.Snapshot) -> Mapping[str, fleet.LeaseKind]:
    """Return the kind of each lease."""
    return {held.lease.lease_id: held.lease.kind for held in snap.leases}


def least_missed(known: snapshot.KnownReplica) -> tuple[bool, bool, int, float, str]:
    """Order victims: stuck, then not yet serving, then least interactive work, then the youngest."""
    stats = known.replica.stats
    serving = known.replica.state is fleet.ReplicaState.SERVING
    interactive = stats.interactive if stats else 0
    return (not stuck(known), serving, interactive, known.age_s, known.replica.replica_id)


def name(deployment: snapshot.Deployment) -> str:
    """Return model and version as people read them."""
    return f"{deployment.spec.model} {deployment.spec.version}"


def gpus(spec: fleet.ReplicaSpec, node_gpus: int, replicas: int = 1) -> int:
    """Return the whole GPUs that replicas keep from others.

    Args:
        spec: one replica's.
        node_gpus: GPUs of a node; what needs more of them has its nodes to itself. 0: not known.
        replicas: how many.
    """
    units = fleet.taken(spec.gpus, node_gpus * spec.hardware.parts)
    return spec.hardware.whole(replicas * units)
