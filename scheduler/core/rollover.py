"""Leases that near their end, or drain: which are replaced now, so that a successor is warm before they go.

A successor takes as long as a start takes, measured; a lease is rolled over that much before its walltime (or
a maintenance window) ends it, and only some at once, so that the overlap stays small. What is in a lease that
rolls does not count any more; it goes on serving until its successor does.
"""

import math
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.core import snapshot, windows

MARGIN = 2.0  # Slurm's queue and a start that is slower than usual
UNKNOWN_START_S = 300.0
# A lease that is shorter than two starts would be replaced as soon as it begins, and its successor likewise.
MOST_OF_LEASE = 0.5


class Settings(Protocol):
    """What rollover needs to be told."""

    @property
    def rollover_at_once(self) -> int:
        """Leases replaced at the same time, at most."""
        ...

    @property
    def drain_s(self) -> float:
        """Seconds that streams may finish in."""
        ...


def left_s(held: snapshot.HeldLease, snap: snapshot.Snapshot) -> float:
    """Return seconds until a lease ends by walltime or by a window."""
    return min(held.left_s, windows.until(snap.closures, held.lease.nodes)[0])


def lead_s(snap: snapshot.Snapshot, settings: Settings) -> float:
    """Return how long before its end a lease is replaced: the slowest start, with margin, and a drain."""
    starts = [
        snap.starts.get(each.key) or (each.scaling.start_s if each.scaling else 0.0)
        for each in snap.deployments
    ]
    return (max(starts, default=0.0) or UNKNOWN_START_S) * MARGIN + settings.drain_s


def rolling(snap: snapshot.Snapshot, settings: Settings) -> frozenset[str]:
    """Return the leases that are being replaced now: those that drain, and a few of those that end first."""
    lead = lead_s(snap, settings)
    ends = sorted(
        (left_s(held, snap), held.lease.lease_id, held.lease.walltime_s)
        for held in snap.leases
        if held.lease.state is fleet.LeaseState.RUNNING
        and not held.leaving
        and not held.drain_asked
    )
    at_once = max(1, settings.rollover_at_once)
    found: set[str] = set()
    for rank, (left, lease_id, walltime) in enumerate(ends):
        if math.isinf(left):
            break
        # Those behind it in the row need as long again for each group before them.
        behind = sum(other < left + lead for other, _, _ in ends[rank + 1 :])
        begin = _bounded(lead * (1 + behind // at_once), walltime)
        if left <= begin and len(found) < at_once:
            found.add(lease_id)
    return frozenset(found | draining(snap))


def draining(snap: snapshot.Snapshot) -> frozenset[str]:
    """Return the leases that an admin drains, each at any time and all at once."""
    return frozenset(
        held.lease.lease_id
        for held in snap.leases
        if held.drain_asked and held.lease.state is fleet.LeaseState.RUNNING and not held.leaving
    )


def why(held: snapshot.HeldLease, snap: snapshot.Snapshot) -> str:
    """Return why a lease is replaced, one line."""
    if held.drain_asked:
        return f"lease {held.lease.lease_id} is drained by {held.drain_asked}"
    return f"lease {held.lease.lease_id} ends in {left_s(held, snap):.0f} s"


def _bounded(lead: float, walltime_s: int) -> float:
    return min(lead, walltime_s * MOST_OF_LEASE) if walltime_s else lead
