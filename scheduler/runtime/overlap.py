"""Adds up what rollover has cost: GPU-seconds held twice, over every leader so far.

The sum stands in one fact that the leader writes every few seconds; what falls into each hour stands in
another, for reports, which is written once a minute while something overlaps. A leader that is killed loses
that much.
"""

from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet
from scheduler.core import overlap, rollover, snapshot
from scheduler.runtime.registry import store

FACT = "rollover"
HOURS = "rollover_hours"
HOUR_US = 3_600_000_000
HOURS_KEPT = 24 * 62  # a report of last month finds it whole
HOURS_EVERY_S = 60.0


class Overlap:
    """The sum.

    Args:
        told: the fact as the leader before has left it; None: there was none.
        now: monotonic seconds.
        now_us: UTC µs.
        hours: the other fact, likewise.
    """

    def __init__(
        self,
        told: Mapping[str, Any] | None,
        now: float,
        now_us: int,
        hours: Mapping[str, Any] | None = None,
    ) -> None:
        told = told or {}
        self._hours = {int(at): float(gpu_s) for at, gpu_s in (hours or {}).items()}
        self._changed = False
        self._hours_due = now
        self._gpu_s = float(told.get("overlap_gpu_s", 0.0))
        self._leases = int(told.get("leases", 0))
        self._since_us = int(told.get("since_us", now_us))
        self._at = now
        self._ending: set[str] = set()

    def note(self, snap: snapshot.Snapshot, settings: rollover.Settings, wanted_gpus: int) -> None:
        """Count the time since the last call, as things are now."""
        passed, self._at = snap.now - self._at, snap.now
        here = {str(held.lease.lease_id): held.lease.state for held in snap.leases}
        self._leases += len(self._ending - here.keys())
        self._ending &= here.keys()
        self._ending |= rollover.rolling(snap, settings)
        still = {
            lease_id
            for lease_id in self._ending
            if here[lease_id] in {fleet.LeaseState.RUNNING, fleet.LeaseState.CLOSING}
        }
        gpu_s = overlap.held_twice(snap, still, wanted_gpus) * max(0.0, passed)
        self._gpu_s += gpu_s
        if gpu_s:
            hour = snap.now_us // HOUR_US * HOUR_US
            self._hours[hour] = self._hours.get(hour, 0.0) + gpu_s
            self._changed = True

    def fact(self) -> dict[str, Any]:
        """Return it for people: leases that were replaced, and GPU-seconds of overlap, since when."""
        return {
            "leases": self._leases,
            "overlap_gpu_s": round(self._gpu_s, 3),
            "since_us": self._since_us,
        }

    def facts(self, now: float) -> dict[str, dict[str, Any]]:
        """Return what is to be written down now, by name."""
        found = {FACT: self.fact()}
        if self._changed and now >= self._hours_due:
            for old in sorted(self._hours)[:-HOURS_KEPT]:
                del self._hours[old]
            found[HOURS] = {str(at): round(gpu_s, 3) for at, gpu_s in self._hours.items()}
            self._changed, self._hours_due = False, now + HOURS_EVERY_S
        return found


def of_registry(registry: store.Registry) -> dict[int, int]:
    """Return GPU-µs of overlap by the UTC µs at which their hour begins; blocks."""
    fact = registry.journal.fact(HOURS)
    found = fact.body if fact else {}
    return {int(at): round(gpu_s * 1_000_000) for at, gpu_s in found.items()}
