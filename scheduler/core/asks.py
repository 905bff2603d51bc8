"""Lease asks, shaped so that Slurm can start them soon, and when not to ask.

A lease is as small as its replica unless the site wants more GPUs in one; more GPUs than a node has are
whole nodes. A least walltime lets Slurm start it sooner. Where every node that could hold it is kept for
maintenance or for somebody else from some time on, its walltime is cut to end before that, if what is left is
worth a start; otherwise it is not asked for.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from scheduler.contracts import fleet, slurm
from scheduler.core import actions, grounds, members, placement, rollover, snapshot, windows

_KEPT = frozenset(
    {"reserved", "maintenance", "planned"}
)  # flags of a node that will be usable again
PATIENCE_S = 60.0  # Slurm gives what was freed to its next job within seconds, or at its next round
MINUTE_S = 60  # Slurm counts walltime in whole minutes; one more, for the time until it starts


class Settings(rollover.Settings, Protocol):
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
    hardware = deployment.spec.hardware
    units, nodes = size(settings, deployment.spec.gpus, hardware)
    each = fleet.taken(deployment.spec.gpus, units // max(1, nodes))
    wanted = grounds.Wanted(kind, of_lease(hardware, each, units), units, nodes)
    able = {node.name for node in grounds.able(snap.nodes, wanted, snap.where)}
    if able and able <= snap.cordoned:
        return (
            None,
            f"{name}: every node that would do is cordoned; `fctl uncordon NODE` lets one back",
        )
    if pending >= settings.pending_leases:
        return None, f"{name}: {pending} leases wait in Slurm's queue already (pending_leases)"
    gpus = hardware.whole(units)
    held = held_gpus(snap, rolling) + sum(
        room.hardware.whole(room.gpus) for room in available if room.lease_id is None
    )
    if snap.gpus and held + gpus > snap.gpus:
        return None, f"{name}: all {snap.gpus} GPUs of the fleet are held, {held} of them now"
    whole, least = settings.lease_walltime_s, settings.lease_time_min_s
    left, window = fitting_s(snap, settings, wanted)
    reason = f"{name} needs {needs(deployment.spec)} and no lease has them"
    cut = 0
    if left < whole:
        least = math.ceil(_worth_s(snap, settings))
        cut = _cut_s(left)
        if cut < least:
            when = f"begins in {left:.0f} s" if left > 0 else "keeps every node that would do"
            return None, f"{name}: {window} {when}, and a lease needs {least} s before it"
        reason += f"; it ends before {window}"
    dedicated = deployment.spec.dedicated
    time_min = min(least, cut or whole)
    spared = snap.cordoned | _spared(snap, kind, rolling)
    # One that may start nowhere would be refused.
    exclude = tuple(sorted(snap.cordoned if able and able <= spared else spared))
    asked = actions.RequestLease(kind, units, reason, dedicated, nodes, cut, time_min, exclude)
    return dataclasses.replace(asked, hardware=wanted.hardware), ""


def promised(asked: actions.RequestLease, deployment: snapshot.Deployment) -> placement.Room:
    """Return the room that an ask brings, beside the replica that it is for."""
    room = placement.Room(
        None,
        False,
        asked.gpus,
        [],
        waits_for="a lease is asked for",
        team=deployment.spec.dedicated,
        kind=asked.kind,
        gpus=asked.gpus,
        nodes=max(1, asked.nodes),
        hardware=asked.hardware,
        free_gb=asked.hardware.memory_gb or math.inf,
    )
    placement.find([room], deployment.spec, new_slots=True, key=deployment.key)
    return room


def of_lease(hardware: fleet.Hardware, units: int, held: int) -> fleet.Hardware:
    """Return what a lease of ``held`` units needs of a node, for as many replicas as it has room for.

    Args:
        hardware: one replica's.
        units: that one replica takes of it.
        held: the lease's.
    """
    each = max(1, held // max(1, units))
    return dataclasses.replace(
        hardware, memory_gb=each * hardware.memory_gb, cpus=each * hardware.cpus
    )


def size(settings: Settings, units: int, hardware: fleet.Hardware) -> tuple[int, int]:
    """Return the units of a lease for a replica, and how many whole nodes they are; 0: one node or less."""
    if hardware.gres == "none":
        return 0, 0
    if hardware.shared:
        # Slurm gives a job parts of one GPU of a node; a lease of more would never start.
        return max(units, min(settings.lease_gpus, 1) * hardware.parts), 0
    gpus = max(settings.lease_gpus, units)
    if units <= settings.node_gpus:
        # Tensor parallelism wants one node: whatever fits into one gets no lease that spans several.
        gpus = min(gpus, settings.node_gpus)
    if settings.node_gpus and gpus > settings.node_gpus:
        nodes = math.ceil(gpus / settings.node_gpus)
        return nodes * settings.node_gpus, nodes
    return gpus, 0


def needs(spec: fleet.ReplicaSpec) -> str:
    """Return what a replica needs, for people: `2 GPUs`, `1 shard of a GPU`, `CPUs`."""
    if spec.hardware.shared:
        return f"{spec.hardware.gres}:{spec.gpus} of a GPU"
    if spec.hardware.gres == "none":
        return "CPUs"
    return f"{spec.gpus} GPUs"


def passed_over(snap: snapshot.Snapshot, going: frozenset[str]) -> Iterator[actions.CloseLease]:
    """Give back asks that keep away from leases which Slurm may preempt for them by now.

    What was given back for such an ask has gone to somebody else: asked anew, it may take its place in
    Slurm's way, and not wait for nodes that others hold.

    Args:
        snap: the picture.
        going: leases that roll, or that this plan gives back.
    """
    spared = _spared(snap, fleet.LeaseKind.SERVE, going) | snap.cordoned
    open_to = {
        node
        for held in snap.leases
        if held.lease.kind is fleet.LeaseKind.BACKFILL
        and held.lease.state is fleet.LeaseState.RUNNING
        for node in held.lease.nodes
    } - spared
    for held in snap.leases:
        lease = held.lease
        waits = lease.state is fleet.LeaseState.PENDING and held.held_s > PATIENCE_S
        if waits and lease.kind is fleet.LeaseKind.SERVE and open_to & set(lease.exclude):
            reason = f"not started within {held.held_s:.0f} s: asked anew, Slurm may preempt for it"
            yield actions.CloseLease(lease.lease_id, reason)


def _spared(
    snap: snapshot.Snapshot, kind: fleet.LeaseKind, going: frozenset[str]
) -> frozenset[str]:
    """Return nodes where Slurm must not preempt for this ask: leases on others are given back for it.

    Slurm preempts as soon as a protected job is submitted, and chooses its victim by itself: it took the
    lease whose replica had just turned to these very callers, beside the one that was being given back.
    """
    backfill = [held for held in snap.leases if held.lease.kind is fleet.LeaseKind.BACKFILL]
    leaving = {
        held.lease.lease_id
        for held in backfill
        if held.leaving
        or held.lease.lease_id in going
        or held.lease.state is fleet.LeaseState.CLOSING
    }
    if kind is not fleet.LeaseKind.SERVE or not leaving:
        return frozenset()
    freed = {node for h in backfill if h.lease.lease_id in leaving for node in h.lease.nodes}
    kept = {node for h in backfill if h.lease.lease_id not in leaving for node in h.lease.nodes}
    return frozenset(kept - freed)


def held_gpus(snap: snapshot.Snapshot, rolling: frozenset[str]) -> int:
    """Return the GPUs of leases that are held or asked for, without those that are given back or roll."""
    return sum(
        held.lease.hardware.whole(held.lease.gpus)
        for held in snap.leases
        if held.lease.state not in {fleet.LeaseState.CLOSING, fleet.LeaseState.ENDED}
        and held.lease.lease_id not in rolling
        and not held.leaving
    )


def fitting_s(
    snap: snapshot.Snapshot, settings: Settings, wanted: grounds.Wanted
) -> tuple[float, str]:
    """Return the longest walltime that crosses no window, seconds, and the window that ends it.

    Nodes that are free now go first, if a lease on them is worth a start; Slurm takes others by itself only
    when they become free. Where no node is known to do every window is taken to close them all.
    """
    count = wanted.count
    able = [
        node
        for node in grounds.able(snap.nodes, wanted, snap.where)
        if node.name not in snap.cordoned and _comes_back(node)
    ]
    if not snap.closures or len(able) < count:
        return windows.until(snap.closures)
    free = [node for node in able if (node.gpus_free or 0) >= wanted.gpus]
    if len(free) >= count:
        now = _longest(snap, free, count)
        if now[0] >= _worth_s(snap, settings):
            return now
    return _longest(snap, able, count)


def crossing(snap: snapshot.Snapshot, settings: Settings) -> Iterator[actions.CloseLease]:
    """Give back asks that wait for the end of a window which a shorter lease would end before."""
    for held in snap.leases:
        lease = held.lease
        if lease.state is not fleet.LeaseState.PENDING or not snap.closures:
            continue
        left, window = fitting_s(snap, settings, grounds.of_lease(lease))
        least = max(lease.time_min_s, math.ceil(_worth_s(snap, settings)))
        if least <= _cut_s(left) and left < (lease.time_min_s or lease.walltime_s):
            yield actions.CloseLease(
                lease.lease_id, f"it would run into {window}: a shorter one fits"
            )


def _cut_s(left: float) -> int:
    """Return the walltime of a lease that shall end before a window."""
    return 0 if math.isinf(left) else max(0, math.floor(left / MINUTE_S) - 1) * MINUTE_S


def _worth_s(snap: snapshot.Snapshot, settings: Settings) -> float:
    """Return the least walltime before a window that is worth it: it is not given up at once again."""
    return max(float(settings.lease_time_min_s), rollover.lead_s(snap, settings))


def _longest(snap: snapshot.Snapshot, nodes: Sequence[slurm.Node], count: int) -> tuple[float, str]:
    ends = sorted((windows.until(snap.closures, [node.name]) for node in nodes), reverse=True)
    return ends[count - 1]


def _comes_back(node: slurm.Node) -> bool:
    return node.usable or (
        node.state in {"idle", "mixed", "allocated"} and node.flags <= _KEPT and bool(node.flags)
    )
