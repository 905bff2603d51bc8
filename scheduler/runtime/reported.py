"""Replicas as agents report them."""

from scheduler.contracts import fleet, ids, wire
from scheduler.contracts.v1 import control_pb2 as pb


def replica(
    lease: fleet.Lease,
    slot: pb.SlotReport,
    item: pb.ReplicaReport,
    spec: fleet.ReplicaSpec | None = None,
) -> fleet.Replica:
    """Return a replica of a report; ``spec``: what it was started with, if that is known."""
    return fleet.Replica(
        replica_id=ids.ReplicaId(item.replica_id),
        cluster=lease.cluster,
        lease_id=lease.lease_id,
        slot_id=ids.SlotId(slot.slot_id),
        slurm_job_id=lease.slurm_job_id,
        node=slot.node or (lease.nodes[0] if lease.nodes else ""),
        spec=wire.spec_from_pb(item.spec) if spec is None else spec,
        state=fleet.ReplicaState(item.state),
        role=fleet.Role(item.role or fleet.Role.SHARED),
        address=item.address,
        incarnation=item.incarnation,
        secret_file=item.secret_file,
        stats=wire.stats_from_pb(item.stats) if item.HasField("stats") else None,
        reason=item.reason,
        phases_s=dict(item.phases_s),
        staging=item.staging,
    )
