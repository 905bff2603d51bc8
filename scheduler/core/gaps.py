"""Replicas that are missing, and which of them no lease has room for."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from scheduler.contracts import fleet, ids
from scheduler.core import members, placement, snapshot


class Settings(Protocol):
    """What gaps need to be told."""

    @property
    def rungs(self) -> Sequence[int]:
        """Rungs of the ladder that may be used."""
        ...

    @property
    def node_gpus(self) -> int:
        """GPUs of a node; 0: not known, so no lease spans nodes."""
        ...

    @property
    def lease_team(self) -> str:
        """Team that leases are charged to which are no team's own."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Replicas of a deployment that are missing in leases of one kind."""

    deployment: snapshot.Deployment
    missing: int
    wanted: int
    kind: fleet.LeaseKind
    role: fleet.Role
    why: str


def in_order(found: Sequence[Gap]) -> Sequence[Gap]:
    """Return the order in which they are filled: the large first, so that they find whole holes."""
    if any(gap.deployment.scaling for gap in found):
        return sorted(found, key=lambda gap: -gap.deployment.spec.gpus)
    return found


def owners(snap: snapshot.Snapshot, settings: Settings) -> Collection[str]:
    """Return the teams that have leases of their own."""
    return {each.spec.dedicated for each in snap.deployments} - {"", settings.lease_team}


def open_to(
    gap: Gap, available: Sequence[placement.Room], settings: Settings, teams: Collection[str]
) -> Sequence[placement.Room]:
    """Return the rooms that a gap may be filled in: its team's, and of its kind where leases live apart."""
    mine = placement.open_to(available, gap.deployment.spec.dedicated, teams)
    if gap.deployment.scaling is not None and 2 not in settings.rungs:
        return [room for room in mine if room.kind is gap.kind]
    return mine


def unplaced(
    snap: snapshot.Snapshot,
    settings: Settings,
    found: Iterable[Gap],
    available: list[placement.Room],
) -> tuple[int, frozenset[ids.LeaseId]]:
    """Return the GPUs that interactive replicas lack, and the empty leases that batch's will use.

    A lease that waits in Slurm's queue is room that has no GPUs yet. What is in quarantine, or pauses after a
    failure, starts nowhere: nobody has to leave for it.

    Args:
        snap: the picture.
        settings: the settings.
        found: what is missing, in order.
        available: rooms, used up.
    """
    lacking = 0
    spoken: set[ids.LeaseId] = set()
    teams = owners(snap, settings)
    waiting = {
        held.lease.lease_id
        for held in snap.leases
        if held.lease.state in {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING}
    }
    for gap in found:
        deployment = gap.deployment
        failures = snap.failures.get(deployment.key)
        paused = failures is not None and failures.waits(snap.now)
        if paused or deployment.quarantined_until_us > snap.now_us:
            continue
        rooms = open_to(gap, available, settings, teams)
        lacks = gap.missing
        for _ in range(gap.missing):
            place = placement.find(rooms, deployment.spec, new_slots=True, key=deployment.key)
            if place is None:
                break
            lacks -= place.room.lease_id not in waiting
            if gap.kind is fleet.LeaseKind.BACKFILL and place.room.lease_id is not None:
                spoken.add(place.room.lease_id)
        if gap.kind is fleet.LeaseKind.SERVE and deployment.scaling is not None:
            lacking += members.gpus(deployment.spec, settings.node_gpus, lacks)
    return lacking, frozenset(spoken)
