"""What the leader keeps of each lease and replica, and the bell that tells of changes."""

import asyncio
import dataclasses
from collections.abc import Collection, Iterable, Mapping

from scheduler.contracts import fleet, ids, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import snapshot
from scheduler.runtime.registry import holdings, retention


class Bell:
    """Wakes everybody who waits for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    def current(self) -> asyncio.Event:
        """Return the event of the next `ring`: take it before looking, so that no ring is missed."""
        return self._event

    async def wait(self) -> None:
        """Return at the next `ring`."""
        await self._event.wait()


@dataclasses.dataclass(slots=True)
class LeaseEntry:
    """A lease, and what is known of its agent; see `snapshot.HeldLease`.

    Attributes:
        asked: monotonic seconds at which this leader asked Slurm for it; None: another one did.
        came_s: seconds from there until its agent spoke: Slurm's queue, and the job's own start.
        seen: monotonic seconds of the agent's last report; `reported_us` is that report's own time.
        acked: newest revision of this leader that the agent has read, -1 if none.
        unread: what its agent said last in words that only a newer release knows.
        connection: the link that counts; a newer one takes its place.
    """

    lease: fleet.Lease
    since: float
    revision: int = 0
    slots: dict[ids.SlotId, snapshot.Slot] = dataclasses.field(default_factory=dict)
    idle_since: float = 0.0
    absent_polls: int = 0
    submitting: bool = False
    asked: float | None = None
    came_s: float = 0.0
    seen: float | None = None
    reported_us: int = 0
    acked: int = -1
    leaving: str = ""
    strangers: tuple[snapshot.Stranger, ...] = ()
    unread: frozenset[str] = frozenset()
    connection: object | None = None

    def forget_slots(self, used: Collection[ids.SlotId]) -> None:
        """Drop slots that ended long ago and that no replica names; the newest keep their numbers."""
        spare = len(self.slots) - retention.SLOTS_KEPT
        if spare > 0:
            for slot_id in sorted(self.slots, key=retention.number)[:spare]:
                if self.slots[slot_id].state.final and slot_id not in used:
                    del self.slots[slot_id]


@dataclasses.dataclass(slots=True)
class ReplicaEntry:
    """A replica that is not final, and what is wanted of it; see `snapshot.KnownReplica`.

    Attributes:
        revision: of what its lease should hold, the first that names it.
        told: monotonic seconds at which it was told `wanted_role`.
        served: whether it has served since `ordered`, when it was started or woken.
        away: monotonic seconds since which it is off the routes by itself, though it had served; else None.
        queue_s: that its lease waited in Slurm, if it was the first that was ordered there.
        allocated: monotonic seconds at which its slot was ready, None before.
        phases_s: of its start, by `core.startup`; empty until it serves.
        adapters: that it is told to hold, name to path, the most urgent first; None: it was not told yet.
    """

    replica: fleet.Replica
    run: bool
    wanted_role: fleet.Role
    drain_s: float
    ordered: float
    revision: int = 0
    created_us: int = 0
    told: float = 0.0
    drain_asked: bool = False
    stats_at: float | None = None
    missing_since: float | None = None
    asleep: bool = False
    served: bool = True
    away: float | None = None
    queue_s: float = 0.0
    allocated: float | None = None
    phases_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    adapters: Mapping[str, str] | None = None

    @property
    def parked(self) -> bool:
        """Whether it is parked: its slot may hold another meanwhile."""
        return self.asleep and self.replica.state is fleet.ReplicaState.ASLEEP

    def turned(self, state: fleet.ReplicaState, now: float) -> None:
        """Note since when it is off the routes by itself: it is told to be in another state now."""
        if state not in {fleet.ReplicaState.WARM, fleet.ReplicaState.UNKNOWN}:
            self.away = None
        elif self.served and self.away is None:
            self.away = now

    def row(self) -> holdings.ReplicaRow:
        """Return what the registry keeps of it."""
        return holdings.ReplicaRow(
            self.replica,
            self.run,
            self.wanted_role,
            self.drain_s,
            self.drain_asked,
            self.created_us,
            self.asleep,
        )


def desired(epoch: int, entry: LeaseEntry, known: Iterable[ReplicaEntry]) -> pb.LeaseDesired:
    """Return what should be in a lease, for its agent.

    Args:
        epoch: the leader's.
        entry: the lease.
        known: replicas; those of other leases are passed over.
    """
    slots = {
        slot.slot_id: pb.SlotDesired(
            epoch=epoch,
            slot_id=slot.slot_id,
            gpus=slot.gpus,
            cpus=slot.cpus,
            close=slot.close,
        )
        for slot in entry.slots.values()
        if not slot.state.final
    }
    for each in known:
        if each.replica.slot_id in slots:
            slots[each.replica.slot_id].replicas.append(
                pb.ReplicaDesired(
                    replica_id=each.replica.replica_id,
                    spec=wire.spec_to_pb(each.replica.spec),
                    role=each.wanted_role.value,
                    run=each.run,
                    drain_s=each.drain_s,
                    asleep=each.asleep,
                    adapters_told=each.adapters is not None,
                    adapters=[
                        pb.AdapterDesired(name=name, path=path)
                        for name, path in (each.adapters or {}).items()
                    ],
                )
            )
    return pb.LeaseDesired(
        epoch=epoch,
        revision=entry.revision,
        lease_id=entry.lease.lease_id,
        slots=slots.values(),
        close=entry.lease.state is fleet.LeaseState.CLOSING,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Pauses:
    """How long a start is put off after a failure."""

    first_s: float
    most_s: float
