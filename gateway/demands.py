"""What the owner of queues tells the broker: who waits, what runs, how soon first tokens came."""

import collections
from collections.abc import Mapping

from gateway import adapters, asks, by_version, local_waiter, model_queue
from scheduler.contracts import fleet, observed, requests
from scheduler.core import load

TTFT_KEPT_S = 10.0


class Demands:
    """The demand for the models whose queues a process owns.

    Args:
        models: the queues, as the room keeps them.
        waiters: the requests in them and on replicas, by id.
        loads: what is in flight.
    """

    def __init__(
        self,
        models: Mapping[str, model_queue.ModelQueue],
        waiters: Mapping[str, local_waiter.LocalWaiter],
        loads: load.Loads,
    ) -> None:
        self._models = models
        self._waiters = waiters
        self._loads = loads
        self._adapters = adapters.Asked()
        self._versions = by_version.Asked()
        self._standard: collections.Counter[str] = collections.Counter()
        self._arrived: collections.Counter[str] = collections.Counter()
        self._ttft: collections.defaultdict[str, collections.deque[tuple[float, float]]] = (
            collections.defaultdict(lambda: collections.deque(maxlen=64))
        )

    def came(self, asking: asks.Asking, needs: asks.Needs) -> None:
        """Count a request; one of batch is no reason to have more replicas."""
        self._adapters.came(asking)
        self._versions.came(asking, needs)
        if asking.tier is not requests.Tier.BATCH:
            self._arrived[asking.model] += 1
        if asking.tier is requests.Tier.STANDARD:
            self._standard[asking.model] += 1

    def first_token(self, model: str, ms: float, now: float) -> None:
        """Note an interactive request's time to its first token."""
        self._ttft[model].append((now, ms))

    def waiting(self, model: str) -> dict[str, int]:
        """Return how many wait for a model, by tier."""
        found = self._models.get(model)
        return found.queue.waiting() if found else {tier.value: 0 for tier in requests.Tier}

    def oldest_wait_s(self, model: str, now: float) -> float:
        """Return how long the model's interactive requests have waited, at most."""
        found = self._models.get(model)
        head = found.queue.oldest(requests.Tier.INTERACTIVE) if found else None
        return 0.0 if head is None else now - head.arrived

    def report(self, routes: Mapping[str, fleet.Route], now: float) -> list[observed.Demand]:
        """Return what waits and runs, by model: those that were asked for, and those that have routes."""
        since = now - TTFT_KEPT_S
        of_adapters = self._adapters.demand(self._waiters.values(), now)
        pooled = [model for model, route in routes.items() if route.pools]
        of_versions = self._versions.demand(self._waiters.values(), now, pooled)
        return [
            observed.Demand(
                model=model,
                waiting=self.waiting(model),
                in_flight=self._loads.by_tier(model),
                oldest_wait_s=self.oldest_wait_s(model, now),
                ttft_ms=tuple(ms for at, ms in self._ttft[model] if at >= since),
                arrived=self._arrived[model],
                arrived_standard=self._standard[model],
                adapters=of_adapters.get(model, {}),
                versions=of_versions.get(model, {}),
            )
            for model in sorted({*self._models, *routes})
        ]
