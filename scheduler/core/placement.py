"""Where a replica can go: the room that leases have, used up as a plan is made.

A slot where the model is parked first (it only has to wake), then an equal slot (no new job step), then the
tightest fit, so that large holes stay whole. Room that is still coming (a lease in Slurm's queue, GPUs that
stopping replicas leave) is reserved, so that no second lease is asked for it.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from scheduler.contracts import fleet, ids
from scheduler.core import snapshot

Key = tuple[str, str]


@dataclasses.dataclass(slots=True)
class Room:
    """What one lease has left, as the plan goes on.

    Attributes:
        lease_id: None for a lease that this plan asks for.
        ready: its agent is there and can start something now.
        free_gpus: GPUs in no slot.
        empty: open slots without a replica.
        closing_gpus: GPUs of slots that close: nothing starts on them before they have.
        used: something of this plan is in it or waits for it.
        waits_for: why it is not ready.
        team: whom the lease is charged to; "" for one that is asked for and is nobody's own.
        kind: what Slurm may do to it.
        gpus: of the lease.
        leaving: slots that stopping replicas are about to leave, with those replicas.
        parked: slot to the models asleep in it, by replica.
        hardware: of the lease; only replicas that need such go in.
        free_gb: host memory that no replica of the lease needs; infinite where it is not counted. What is
            parked has memory of its own (`snapshot.HeldLease.park_gb`).
        coming_gb: host memory that stopping replicas leave.
        nodes: that it has whole; only what is larger than one of several goes in, and takes whole ones.
    """

    lease_id: ids.LeaseId | None
    ready: bool
    free_gpus: int
    empty: list[snapshot.Slot]
    closing_gpus: int = 0
    used: bool = False
    waits_for: str = ""
    team: str = ""
    kind: fleet.LeaseKind = fleet.LeaseKind.SERVE
    gpus: int = 0
    leaving: list[tuple[snapshot.Slot, ids.ReplicaId]] = dataclasses.field(default_factory=list)
    parked: Mapping[ids.SlotId, Mapping[Key, ids.ReplicaId]] = dataclasses.field(
        default_factory=dict
    )
    hardware: fleet.Hardware = fleet.ANY_NODE
    free_gb: float = math.inf
    coming_gb: float = 0.0
    nodes: int = 1

    def takes(self, gpus: int) -> int | None:
        """Return the units that a replica of so many takes here; None: it can't be here.

        On a node of several what is left is not told apart from what is left on others: a replica that needs
        its GPUs on one node might find them spread over two.
        """
        each = self.gpus // self.nodes
        return None if self.nodes > 1 and gpus <= each else fleet.taken(gpus, each)


_Able = tuple[Room, int]  # with what the replica takes there


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a replica goes.

    Attributes:
        room: the lease's room.
        slot_id: an empty slot; None for a new one.
        close: slots that must be closed first.
        waits_for: what it waits for, one line; "" if it can start now.
        wakes: the parked replica that only has to wake there.
    """

    room: Room
    slot_id: ids.SlotId | None = None
    close: tuple[snapshot.Slot, ...] = ()
    waits_for: str = ""
    wakes: ids.ReplicaId | None = None


def rooms(
    snap: snapshot.Snapshot,
    *,
    silent_s: float,
    stopping: Collection[ids.ReplicaId] = (),
    closed: Collection[ids.LeaseId] = (),
) -> list[Room]:
    """Return the room of every lease that something could be started in, now or soon.

    Args:
        snap: the picture.
        silent_s: an agent that said nothing for longer starts nothing.
        stopping: replicas that this plan stops; their slots, and those of replicas that stop already,
            are room that is coming.
        closed: leases that nothing new goes to.
    """
    awake = [known for known in snap.replicas if not known.parked]
    occupied = {known.replica.slot_id for known in awake}
    leaving = {
        known.replica.slot_id: known.replica.replica_id
        for known in awake
        if not known.run or not known.awake or known.replica.replica_id in stopping
    }
    parked = _parked(snap)
    needed, coming = _memory(awake, leaving.values())
    reasons = {job.stamp.lease_id: job.reason for job in snap.jobs or () if job.stamp is not None}
    found: list[Room] = []
    for held in snap.leases:
        lease = held.lease
        if held.leaving or (held.silent_s is not None and held.silent_s > silent_s):
            continue
        if lease.lease_id in closed:
            continue
        if lease.state in {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING}:
            reason = reasons.get(lease.lease_id, lease.reason)
            why = f"lease {lease.lease_id} waits in Slurm's queue ({reason})"
            room = Room(
                lease.lease_id,
                False,
                lease.gpus,
                [],
                waits_for=why,
                team=lease.team,
                kind=lease.kind,
                gpus=lease.gpus,
                hardware=lease.hardware,
                free_gb=lease.hardware.memory_gb or math.inf,
                nodes=max(1, lease.whole_nodes),
            )
            found.append(room)
        elif lease.state is fleet.LeaseState.RUNNING:
            open_slots = [slot for slot in held.slots if not slot.state.final]
            found.append(
                Room(
                    lease.lease_id,
                    held.silent_s is not None,
                    _free(lease, open_slots),
                    [
                        slot
                        for slot in open_slots
                        if slot.state.takes and not slot.close and slot.slot_id not in occupied
                    ],
                    closing_gpus=sum(slot.gpus for slot in open_slots if slot.close),
                    waits_for=f"the agent of lease {lease.lease_id} has not come yet",
                    team=lease.team,
                    kind=lease.kind,
                    gpus=lease.gpus,
                    leaving=[
                        (slot, leaving[slot.slot_id])
                        for slot in open_slots
                        if slot.state.takes and not slot.close and slot.slot_id in leaving
                    ],
                    parked=parked,
                    hardware=lease.hardware,
                    free_gb=(lease.hardware.memory_gb or math.inf) - needed[lease.lease_id],
                    coming_gb=coming[lease.lease_id],
                    nodes=max(1, lease.whole_nodes),
                )
            )
    return found


def _memory(
    awake: Sequence[snapshot.KnownReplica], leaving: Collection[ids.ReplicaId]
) -> tuple[Mapping[ids.LeaseId, float], Mapping[ids.LeaseId, float]]:
    """Return the host memory that replicas need by lease, and what of it those that leave will free."""
    needed: dict[ids.LeaseId, float] = collections.defaultdict(float)
    coming: dict[ids.LeaseId, float] = collections.defaultdict(float)
    for known in awake:
        replica = known.replica
        needed[replica.lease_id] += replica.spec.hardware.memory_gb
        if replica.replica_id in leaving:
            coming[replica.lease_id] += replica.spec.hardware.memory_gb
    return needed, coming


def _free(lease: fleet.Lease, open_slots: Sequence[snapshot.Slot]) -> int:
    """Return the units in no slot; a lease without any is full with its one replica."""
    if lease.hardware.gres == "none":
        return -1 if open_slots else 0
    return lease.gpus - sum(slot.gpus for slot in open_slots)


def _parked(snap: snapshot.Snapshot) -> Mapping[ids.SlotId, Mapping[Key, ids.ReplicaId]]:
    found: dict[ids.SlotId, dict[Key, ids.ReplicaId]] = {}
    for known in snap.replicas:
        if known.parked:
            found.setdefault(known.replica.slot_id, {})[known.key] = known.replica.replica_id
    return found


def open_to(available: Sequence[Room], dedicated: str, owners: Collection[str]) -> Sequence[Room]:
    """Return the rooms that a deployment may use: a team's own leases are for its floor alone.

    Args:
        available: rooms.
        dedicated: the team whose floor the deployment is, or "".
        owners: teams that have leases of their own.
    """
    own = dedicated if dedicated in owners else ""
    return [room for room in available if (room.team if room.team in owners else "") == own]


def fit_for(
    available: Sequence[Room], hardware: fleet.Hardware, *, coming: bool = False
) -> Sequence[Room]:
    """Return the rooms of such hardware with memory left for one more replica.

    A part of a GPU is a share of its load; host memory is counted beside it, so that small replicas of
    several models fill a lease by both.

    Args:
        available: rooms.
        hardware: that the replica needs.
        coming: count what stopping replicas will leave, too.
    """
    return [
        room
        for room in available
        if room.hardware.place == hardware.place
        and room.free_gb + (room.coming_gb if coming else 0.0) >= hardware.memory_gb
    ]


def find(
    available: Sequence[Room], spec: fleet.ReplicaSpec, *, new_slots: bool, key: Key
) -> Place | None:
    """Find a place for a replica by units and by memory, and use it up; None if no lease has room.

    Args:
        available: rooms, changed in place.
        spec: the replica's.
        new_slots: see `take`.
        key: see `take`.
    """
    hardware = spec.hardware
    place = take(fit_for(available, hardware), spec.gpus, new_slots=new_slots, key=key)
    if place is None:
        later = fit_for(available, hardware, coming=True)
        place = take(later, spec.gpus, new_slots=new_slots, key=key)
        if place is not None:
            why = place.waits_for or f"memory of lease {place.room.lease_id} is not free yet"
            place = dataclasses.replace(place, waits_for=why, wakes=None)
    if place is not None:
        place.room.free_gb -= hardware.memory_gb
    return place


def take(
    available: Sequence[Room], gpus: int, *, new_slots: bool, key: Key = ("", "")
) -> Place | None:
    """Find a place for a replica of ``gpus`` GPUs and use it up; None if no lease has room.

    Args:
        available: rooms, changed in place.
        gpus: GPUs that it needs.
        new_slots: whether new slots can be started now (Slurm answers).
        key: model and version, to find where it is parked.
    """
    able = [(room, need) for room in available if (need := room.takes(gpus)) is not None]
    ready = [(room, need) for room, need in able if room.ready]
    equal = [(room, slot) for room, need in ready for slot in room.empty if slot.gpus == need]
    asleep = [pair for pair in equal if key in pair[0].parked.get(pair[1].slot_id, {})]
    for room, slot in asleep or equal:
        room.empty.remove(slot)
        room.used = True
        return Place(room, slot.slot_id, wakes=room.parked.get(slot.slot_id, {}).get(key))
    if not new_slots:
        return _leaving(ready)
    if tightest := _tightest(ready):
        return _new_slot(*tightest)
    for room, need in ready:
        if room.free_gpus + room.closing_gpus >= need:
            return _await(room, need)
    for room, need in ready:
        if room.free_gpus + room.closing_gpus + sum(slot.gpus for slot in room.empty) >= need:
            return _recut(room, need)
    coming = _leaving(ready)
    if coming is not None:
        return coming
    for room, need in ready:
        if unspoken(room) >= need:
            return _gather(room, need)
    later = _tightest([(room, need) for room, need in able if not room.ready])
    return _new_slot(*later) if later else None


def _tightest(able: Sequence[_Able]) -> _Able | None:
    """Return the room that has the least left of those that have enough free."""
    fitting = [pair for pair in able if pair[0].free_gpus >= pair[1]]
    return min(fitting, key=lambda pair: pair[0].free_gpus, default=None)


def _leaving(ready: Sequence[_Able]) -> Place | None:
    """Take an equal slot that a stopping replica leaves; the next plan finds it empty."""
    for room, need in ready:
        for slot, replica_id in room.leaving:
            if slot.gpus == need:
                room.leaving.remove((slot, replica_id))
                room.used = True
                return Place(room, waits_for=f"replica {replica_id} is stopping")
    return None


def unspoken(room: Room) -> int:
    """Return the GPUs of a room that are free, or will be, and that nothing of this plan takes."""
    held = sum(slot.gpus for slot in (*room.empty, *(slot for slot, _ in room.leaving)))
    return room.free_gpus + room.closing_gpus + held


def _gather(room: Room, gpus: int) -> Place:
    """Speak for GPUs that several stopping replicas leave; what is empty already closes now."""
    close: list[snapshot.Slot] = []
    got = room.free_gpus + room.closing_gpus
    for slot in list(room.empty):
        close.append(slot)
        room.empty.remove(slot)
        room.closing_gpus += slot.gpus
        got += slot.gpus
    for slot, replica_id in sorted(room.leaving, key=lambda pair: -pair[0].gpus):
        if got >= gpus:
            break
        room.leaving.remove((slot, replica_id))
        # Counted as closing: it will be closed as soon as it is empty.
        room.closing_gpus += slot.gpus
        got += slot.gpus
    return _await(room, gpus, tuple(close))


def _new_slot(room: Room, gpus: int) -> Place:
    room.free_gpus -= gpus or room.hardware.gres == "none"
    room.used = True
    return Place(room, waits_for="" if room.ready else room.waits_for)


def _await(room: Room, gpus: int, close: tuple[snapshot.Slot, ...] = ()) -> Place:
    """Take what is free, and the rest of what is closing; both are then spoken for."""
    room.closing_gpus -= gpus - room.free_gpus
    room.free_gpus = 0
    room.used = True
    return Place(room, None, close, f"slots of lease {room.lease_id} are closing")


def _recut(room: Room, gpus: int) -> Place:
    """Close as few empty slots as make room; the replica follows when they have closed."""
    close: list[snapshot.Slot] = []
    for slot in sorted(room.empty, key=lambda slot: -slot.gpus):
        if room.free_gpus + room.closing_gpus >= gpus:
            break
        close.append(slot)
        room.empty.remove(slot)
        room.closing_gpus += slot.gpus
    return _await(room, gpus, tuple(close))
