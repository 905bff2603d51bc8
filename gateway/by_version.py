"""What a queue's owner tells of versions, where some requests go to one by their length. Pure."""

import collections
from collections.abc import Collection, Iterable, Mapping

from gateway import asks, local_waiter
from scheduler.contracts import observed, requests

Key = tuple[str, str]


class Asked:
    """Counts requests by model and version since this process began."""

    def __init__(self) -> None:
        self._arrived: collections.Counter[Key] = collections.Counter()

    def came(self, asking: asks.Asking, needs: asks.Needs) -> None:
        """Count a request of tier interactive or standard."""
        if asking.tier is not requests.Tier.BATCH:
            self._arrived[asking.model, needs.version] += 1

    def demand(
        self,
        waiters: Iterable[local_waiter.LocalWaiter],
        now: float,
        pooled: Collection[str],
    ) -> Mapping[str, Mapping[str, observed.VersionDemand]]:
        """Return what waits and runs, by model and version.

        Args:
            waiters: every request that is here.
            now: monotonic seconds.
            pooled: models whose routes have pools; of the others the whole says enough.
        """
        if not pooled:
            return {}
        waiting: collections.Counter[Key] = collections.Counter()
        in_flight: collections.Counter[Key] = collections.Counter()
        oldest: dict[Key, float] = {}
        for waiter in waiters:
            if waiter.asking.model not in pooled or waiter.asking.tier is requests.Tier.BATCH:
                continue
            key = waiter.asking.model, waiter.needs.version
            if waiter.dispatched:
                in_flight[key] += 1
            else:
                waiting[key] += 1
                oldest[key] = max(oldest.get(key, 0.0), now - waiter.arrived)
        found: dict[str, dict[str, observed.VersionDemand]] = {}
        for key in self._arrived.keys() | waiting.keys() | in_flight.keys():
            model, version = key
            if model in pooled:
                found.setdefault(model, {})[version] = observed.VersionDemand(
                    waiting[key], in_flight[key], oldest.get(key, 0.0), self._arrived[key]
                )
        return found
