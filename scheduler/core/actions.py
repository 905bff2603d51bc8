"""What a plan may ask for. Each action says why; the applier checks it again before it acts."""

import dataclasses

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import replicas, snapshot


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLease:
    """Ask Slurm for a lease.

    Attributes:
        team: whose own it is; "" for the platform's.
        nodes: whole nodes; 0: `gpus` on any one node.
        walltime_s: 0: as the settings say; less where a window comes before that.
        time_min_s: the least walltime that is still useful, so that Slurm can start it sooner; 0: none.
        exclude: nodes that are cordoned, or where nothing may be preempted for it.
    """

    kind: fleet.LeaseKind
    gpus: int
    reason: str
    team: str = ""
    nodes: int = 0
    walltime_s: int = 0
    time_min_s: int = 0
    exclude: tuple[str, ...] = ()
    hardware: fleet.Hardware = fleet.ANY_NODE


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptLease:
    """Take a job that bears our stamp and that the registry does not know."""

    job: slurm.Job
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class FollowLease:
    """Write down what Slurm says of a lease; `job` is its job where Slurm named it."""

    lease_id: ids.LeaseId
    event: replicas.LeaseEvent
    job: slurm.Job | None
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CloseLease:
    """Give a lease back: its agent closes every slot and leaves."""

    lease_id: ids.LeaseId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CancelJob:
    """Cancel a lease's job in Slurm."""

    lease_id: ids.LeaseId
    job_id: ids.SlurmJobId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StartReplica:
    """Start a replica in a lease: in `slot_id`, or in a new slot if that is None."""

    lease_id: ids.LeaseId
    slot_id: ids.SlotId | None
    spec: fleet.ReplicaSpec
    role: fleet.Role
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ParkReplica:
    """Drain a replica, then put it to sleep: its GPUs are free, its weights wait in host memory (rung 2)."""

    replica_id: ids.ReplicaId
    drain_s: float
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class WakeReplica:
    """Wake a parked replica on the GPUs of its slot (rung 2)."""

    replica_id: ids.ReplicaId
    role: fleet.Role
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptReplica:
    """Take a replica that an agent reports and that the registry does not know."""

    stranger: snapshot.Stranger
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StopReplica:
    """Drain a replica for `drain_s` seconds, then stop it; `failed` counts it as a failed start."""

    replica_id: ids.ReplicaId
    drain_s: float
    reason: str
    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SetRole:
    """Tell a replica what it may take now."""

    replica_id: ids.ReplicaId
    role: fleet.Role
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class MarkLost:
    """Write a replica off: what held it is gone."""

    replica_id: ids.ReplicaId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CloseSlot:
    """Close an empty slot, so that its GPUs can be cut anew."""

    lease_id: ids.LeaseId
    slot_id: ids.SlotId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Quarantine:
    """Start nothing of a model's version until `until_us`."""

    model: str
    version: str
    until_us: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CordonNode:
    """Keep off a node until `until_us`."""

    node: str
    until_us: int
    reason: str


Action = (
    RequestLease
    | AdoptLease
    | FollowLease
    | CloseLease
    | CancelJob
    | StartReplica
    | ParkReplica
    | WakeReplica
    | AdoptReplica
    | StopReplica
    | SetRole
    | MarkLost
    | CloseSlot
    | Quarantine
    | CordonNode
)
