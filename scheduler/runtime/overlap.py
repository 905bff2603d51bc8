"""Adds up what rollover has cost: GPU-seconds held twice, over every leader so far.

It stands in one fact that the leader writes every few seconds: a leader that is killed loses that much of it.
"""

from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet
from scheduler.core import overlap, rollover, snapshot

FACT = "rollover"


class Overlap:
    """The sum.

    Args:
        told: the fact as the leader before has left it; None: there was none.
        now: monotonic seconds.
        now_us: UTC µs.
    """

    def __init__(self, told: Mapping[str, Any] | None, now: float, now_us: int) -> None:
        told = told or {}
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
        self._gpu_s += overlap.held_twice(snap, still, wanted_gpus) * max(0.0, passed)

    def fact(self) -> dict[str, Any]:
        """Return it for people: leases that were replaced, and GPU-seconds of overlap, since when."""
        return {
            "leases": self._leases,
            "overlap_gpu_s": round(self._gpu_s, 3),
            "since_us": self._since_us,
        }
