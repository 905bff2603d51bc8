"""Times the start of a replica by what is heard of it: `core.startup` says which phases there are."""

import dataclasses
from collections.abc import Iterable, Mapping

from scheduler.contracts import fleet, ids
from scheduler.core import startup
from scheduler.runtime import entries


def queue_s(entry: entries.LeaseEntry) -> float:
    """Return how long a lease took to come up, for the first replica that is ordered in it; else 0."""
    lease = entry.lease
    if entry.slots or not lease.requested_us or not lease.started_us:
        return 0.0
    if entry.came_s:
        return entry.came_s
    return max(0.0, (lease.started_us - lease.requested_us) / 1_000_000)


def allocated(known: Iterable[entries.ReplicaEntry], slot_id: ids.SlotId, now: float) -> None:
    """Note that a slot has its GPUs, for the replicas that wait for that."""
    for each in known:
        if each.replica.slot_id == slot_id and each.allocated is None:
            each.allocated = now


def served(
    known: entries.ReplicaEntry, told: Mapping[str, float], now: float
) -> Mapping[str, float]:
    """Note that a replica serves, and return its phases in seconds."""
    begun = known.ordered if known.allocated is None else known.allocated
    known.phases_s = startup.phases(
        told,
        queue_s=known.queue_s,
        allocate_s=begun - known.ordered,
        total_s=now - known.ordered,
    )
    return known.phases_s


def shown(known: entries.ReplicaEntry, after: fleet.Replica) -> fleet.Replica:
    """Return a replica with the phases of its start where they are known, as it told them until then."""
    if not known.phases_s:
        return after
    return dataclasses.replace(after, phases_s=known.phases_s)
