"""Lease asks, shaped so that Slurm can start them soon, and when not to ask.

A lease is as small as its replica unless the site wants more GPUs in one; more GPUs than a node has are
whole nodes. Its walltime ends before the next window of its cluster, and a least walltime lets Slurm start it
sooner.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.core import actions, members, placement, snapshot, windows


class Settings(Protocol):
    """What asking needs to be told."""

    @property
    def lease_gpus(self) -> int:
        """GPUs of one lease; 0: as many as the replica."""
        ...

    @property
    def node_gpus(self) -> int:
        """GPUs of a node; 0: not known, so no lease spans nodes."""
        ...

    @property
    def lease_walltime_s(self) -> int:
        """Walltime asked for, seconds."""
        ...

    @property
    def lease_time_min_s(self) -> int:
        """Least walltime that is still useful, seconds; 0: only the whole."""
        ...

    @property
    def pending_leases(self) -> int:
        """Most leases in Slurm's queue at once."""
        ...


def ask(
    snap: snapshot.Snapshot,
    settings: Settings,
    deployment: snapshot.Deployment,
    kind: fleet.LeaseKind,
    available: Sequence[placement.Room],
    rolling: frozenset[str],
) -> tuple[actions.RequestLease | None, str]:
    """Return the ask for a replica that has no room, or None and why not."""
    name = members.name(deployment)
    pending = sum(
        held.lease.state in {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING}
        for held in snap.leases
    ) + sum(room.lease_id is None for room in available)
    if snap.jobs is None:
        return None, f"{name}: no room, and Slurm does not answer"
    if snap.lease_pause.waits(snap.now):
        pause = snap.lease_pause.until - snap.now
        return None, f"{name}: next lease asked for in {pause:.1f} s: {snap.lease_pause.reason}"
    if pending >= settings.pending_leases:
        return None, f"{name}: {pending} leases wait in Slurm's queue already (pending_leases)"
    gpus = max(settings.lease_gpus, deployment.spec.gpus)
    nodes = 0
    if settings.node_gpus and gpus > settings.node_gpus:
        nodes = math.ceil(gpus / settings.node_gpus)
        gpus = nodes * settings.node_gpus
    held = held_gpus(snap, rolling) + sum(room.gpus for room in available if room.lease_id is None)
    if snap.gpus and held + gpus > snap.gpus:
        return None, f"{name}: all {snap.gpus} GPUs of the fleet are held, {held} of them now"
    walltime, least, window = _walltime(snap, settings)
    if walltime < max(1, least):
        return None, f"{name}: {window} begins in {walltime} s, no lease would end before it"
    reason = f"{name} needs {deployment.spec.gpus} GPUs and no lease has them"
    if window:
        reason += f"; it ends before {window}"
    cut = walltime if walltime < settings.lease_walltime_s else 0
    return (
        actions.RequestLease(
            kind, gpus, reason, deployment.spec.dedicated, nodes, cut, min(least, walltime)
        ),
        "",
    )


def held_gpus(snap: snapshot.Snapshot, rolling: frozenset[str]) -> int:
    """Return the GPUs of leases that are held or asked for, without those that are given back or roll."""
    return sum(
        held.lease.gpus
        for held in snap.leases
        if held.lease.state not in {fleet.LeaseState.CLOSING, fleet.LeaseState.ENDED}
        and held.lease.lease_id not in rolling
        and not held.leaving
    )


def _walltime(snap: snapshot.Snapshot, settings: Settings) -> tuple[int, int, str]:
    """Return walltime, least walltime, and the window that cuts it ("" if none does)."""
    due, name = windows.until(snap.closures)
    whole = settings.lease_walltime_s
    if due >= whole:
        return whole, settings.lease_time_min_s, ""
    return int(due), settings.lease_time_min_s, name
