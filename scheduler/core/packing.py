"""Whole holes: GPUs enough are free but scattered, so small replicas move together and a large one fits.

A move costs a start, so it is made only when the large replica fits nowhere and the small ones find room, by
GPUs and by host memory, in the holes that are left; batch replicas move first, and the fewest that make the
hole.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler.contracts import fleet
from scheduler.core import placement, snapshot


@dataclasses.dataclass(frozen=True, slots=True)
class Hole:
    """A room that becomes large enough when ``moved`` have left it."""

    room: placement.Room
    moved: tuple[snapshot.KnownReplica, ...]


def make_hole(
    available: Sequence[placement.Room],
    movable: Iterable[snapshot.KnownReplica],
    gpus: int,
    memory_gb: float = 0.0,
) -> Hole | None:
    """Return the cheapest hole for ``gpus`` GPUs of one node, None if none can be made.

    Args:
        available: rooms as this plan has left them, all of the hardware that is needed.
        movable: replicas that may be stopped here and started elsewhere.
        gpus: of the large replica.
        memory_gb: host memory that it needs, in 10^9 bytes.
    """
    ready = {room.lease_id: room for room in available if room.ready and room.nodes == 1}
    free = {
        lease_id: _Free(placement.unspoken(room), room.free_gb + room.coming_gb)
        for lease_id, room in ready.items()
    }
    inside: dict[str, list[snapshot.KnownReplica]] = {}
    for known in movable:
        replica = known.replica
        if replica.lease_id in ready and 0 < replica.spec.gpus < gpus:
            inside.setdefault(replica.lease_id, []).append(known)
    found: list[tuple[tuple[int, int, str], Hole]] = []
    for lease_id, room in ready.items():
        if room.gpus < gpus:
            continue
        chosen: list[snapshot.KnownReplica] = []
        got = free[lease_id].gpus
        for known in sorted(inside.get(lease_id or "", ()), key=_cost):
            if got >= gpus:
                break
            chosen.append(known)
            got += known.replica.spec.gpus
        if got < gpus or not chosen:
            continue
        freed_gb = sum(known.replica.spec.hardware.memory_gb for known in chosen)
        left_gb = free[lease_id].gb + freed_gb - memory_gb
        left = {**free, lease_id: _Free(got - gpus, left_gb)}
        if left_gb >= 0 and _fit(chosen, left.values()):
            moved = sum(known.replica.spec.gpus for known in chosen)
            serving = sum(known.wanted_role is not fleet.Role.BATCH for known in chosen)
            found.append(((serving, moved, lease_id or ""), Hole(room, tuple(chosen))))
    return min(found, key=lambda pair: pair[0])[1] if found else None


class _Free(NamedTuple):
    """What a lease has left for replicas that move."""

    gpus: int
    gb: float


def _fit(moved: Iterable[snapshot.KnownReplica], left: Iterable[_Free]) -> bool:
    """Return whether each of ``moved`` finds room in ``left``: the largest first, in the tightest."""
    rooms = list(left)
    for known in sorted(moved, key=lambda known: -known.replica.spec.gpus):
        spec = known.replica.spec
        need = _Free(spec.gpus, spec.hardware.memory_gb)
        fitting = [room for room in rooms if room.gpus >= need.gpus and room.gb >= need.gb]
        if not fitting:
            return False
        room = min(fitting)
        rooms.remove(room)
        rooms.append(_Free(room.gpus - need.gpus, room.gb - need.gb))
    return True


def _cost(known: snapshot.KnownReplica) -> tuple[bool, int, str]:
    """Order by role, then the larger first, so that few move."""
    batch = known.wanted_role is fleet.Role.BATCH
    return (not batch, -known.replica.spec.gpus, known.replica.replica_id)
