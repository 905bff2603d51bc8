"""Whole holes: GPUs enough are free but scattered, so small replicas move together and a large one fits.

A move costs a start, so it is made only when the large replica fits nowhere and the small ones find room in
the holes that are left; batch replicas move first, and the fewest that make the hole.
"""

import dataclasses
from collections.abc import Iterable, Sequence

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
) -> Hole | None:
    """Return the cheapest hole for ``gpus`` GPUs, None if none can be made.

    Args:
        available: rooms as this plan has left them.
        movable: replicas that may be stopped here and started elsewhere.
        gpus: of the large replica.
    """
    ready = {room.lease_id: room for room in available if room.ready}
    free = {lease_id: placement.unspoken(room) for lease_id, room in ready.items()}
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
        got = free[lease_id]
        for known in sorted(inside.get(lease_id or "", ()), key=_cost):
            if got >= gpus:
                break
            chosen.append(known)
            got += known.replica.spec.gpus
        moved = sum(known.replica.spec.gpus for known in chosen)
        elsewhere = sum(free.values()) - free[lease_id]
        if got >= gpus and chosen and moved <= elsewhere + got - gpus:
            serving = sum(known.wanted_role is not fleet.Role.BATCH for known in chosen)
            found.append(((serving, moved, lease_id or ""), Hole(room, tuple(chosen))))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _cost(known: snapshot.KnownReplica) -> tuple[bool, int, str]:
    """Order by role, then the larger first, so that few move."""
    batch = known.wanted_role is fleet.Role.BATCH
    return (not batch, -known.replica.spec.gpus, known.replica.replica_id)
