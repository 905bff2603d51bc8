"""Whether one team crowds a model: it has more in flight than its equal part while others come too.

Fairness orders who waits; it cannot help a request that finds every replica busy with another team's
prompts. So a team that crowds leaves some replicas' room to the others. Pure; batch is not counted, since
it gives way by itself.
"""

import collections

SEEN_S = 60.0  # a team that came this lately is reckoned to come again


class Crowd:
    """The teams of one model."""

    def __init__(self) -> None:
        self._seen: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._running: collections.Counter[str] = collections.Counter()
        self._total = 0

    def came(self, team: str, now: float) -> None:
        """Note that a request of ``team`` came."""
        self._seen[team] = now
        self._seen.move_to_end(team)
        self._forget(now)

    def ran(self, team: str, change: int) -> None:
        """Note that a request of ``team`` was dispatched (1) or has ended there (-1)."""
        self._running[team] += change
        self._total += change
        if not self._running[team]:
            del self._running[team]

    def crowds(self, team: str, now: float) -> bool:
        """Return whether ``team`` has more in flight than its equal part of all that come lately."""
        self._forget(now)
        others = len(self._seen) - (team in self._seen)
        return others > 0 and self._running[team] * (others + 1) > self._total

    def _forget(self, now: float) -> None:
        """Drop teams that have not come for a while; the one that came longest ago stands first."""
        while self._seen and next(iter(self._seen.values())) < now - SEEN_S:
            self._seen.popitem(last=False)
