"""Replicas as agents report them; a word that only a newer release knows cuts no agent off."""

from collections.abc import Iterator

from scheduler.contracts import fleet, ids, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import replicas

_SLOT_STATES = frozenset(replicas.SlotState)


def replica(
    lease: fleet.Lease,
    slot: pb.SlotReport,
    item: pb.ReplicaReport,
    spec: fleet.ReplicaSpec | None = None,
) -> fleet.Replica:
    """Return a replica of a report; ``spec``: what it was started with, if that is known."""
    state, role = wire.standing_from_pb(item)
    return fleet.Replica(
        replica_id=ids.ReplicaId(item.replica_id),
        cluster=lease.cluster,
        lease_id=lease.lease_id,
        slot_id=ids.SlotId(slot.slot_id),
        slurm_job_id=lease.slurm_job_id,
        node=slot.node or (lease.nodes[0] if lease.nodes else ""),
        spec=wire.spec_of_others(item.spec) if spec is None else spec,
        state=state,
        role=role,
        address=item.address,
        incarnation=item.incarnation,
        secret_file=item.secret_file,
        stats=wire.stats_from_pb(item.stats) if item.HasField("stats") else None,
        reason=item.reason,
        phases_s=dict(item.phases_s),
        staging=item.staging,
        adapters=wire.adapters_from_pb(item),
        adapter_room=item.adapter_room,
        nodes=tuple(item.nodes),
    )


def unread(report: pb.LeaseReport) -> Iterator[str]:
    """Yield what of a report is told in words that are not known here, one line each."""
    for slot in report.slots:
        if slot.state not in _SLOT_STATES:
            yield f"slot {slot.slot_id}: state {slot.state!r}"
        for item in slot.replicas:
            for what, word in wire.unread(item):
                yield f"replica {item.replica_id}: {what} {word!r}"
