"""What a queue's owner knows of adapters: who waits for one that is not loaded, and is told what. Pure."""

import collections
from collections.abc import Iterable, Mapping

from gateway import asks, local_waiter, refusals, standing
from scheduler.contracts import errors, observed, requests
from scheduler.core import routing

GONE_S = 2.0  # a change of the catalog is live everywhere within one


class Asked:
    """Counts requests by model and adapter since this process began."""

    def __init__(self) -> None:
        self._arrived: collections.Counter[tuple[str, str]] = collections.Counter()

    def came(self, asking: asks.Asking) -> None:
        """Count a request; a copy of one is none that anybody asked for."""
        if asking.adapter is not None and not asking.spare:
            self._arrived[asking.model, asking.adapter] += 1

    def demand(
        self, waiters: Iterable[local_waiter.LocalWaiter], now: float
    ) -> Mapping[str, Mapping[str, observed.AdapterDemand]]:
        """Return what is asked for, by model and adapter.

        Args:
            waiters: every request that is here.
            now: monotonic seconds.
        """
        waiting: collections.Counter[tuple[str, str]] = collections.Counter()
        batch: collections.Counter[tuple[str, str]] = collections.Counter()
        oldest: dict[tuple[str, str], float] = {}
        for waiter in waiters:
            adapter = waiter.asking.adapter
            if adapter is not None and not waiter.dispatched:
                key = waiter.asking.model, adapter
                if waiter.asking.tier is requests.Tier.BATCH:
                    batch[key] += 1
                    continue
                waiting[key] += 1
                oldest[key] = max(oldest.get(key, 0.0), now - waiter.arrived)
        found: collections.defaultdict[str, dict[str, observed.AdapterDemand]] = (
            collections.defaultdict(dict)
        )
        for model, adapter in self._arrived.keys() | waiting.keys() | batch.keys():
            key = model, adapter
            found[model][adapter] = observed.AdapterDemand(
                waiting[key], oldest.get(key, 0.0), self._arrived[key], batch[key]
            )
        return found


def expired(known: standing.Standing, waiter: local_waiter.LocalWaiter) -> errors.Expired:
    """Return what a request is told that waited until its deadline."""
    asking, needs = waiter.asking, waiter.needs
    if asking.adapter is None or known.takes(
        asking.model, needs.version, asking.adapter, asking.tier
    ):
        route = known.view.routes.get(asking.model)
        outlook = known.outlooks.get((asking.model, needs.version), routing.Outlook.NONE)
        up = outlook is routing.Outlook.SERVING
        return refusals.expired(asking.model, 0.0 if up or route is None else route.start_s)
    return refusals.cold(asking.model, asking.adapter, known.adapter_load_s(asking.model))


def check(known: standing.Standing, asking: asks.Asking) -> None:
    """Refuse a request for an adapter that no replica can serve.

    Raises:
        errors.NoReplica: with the reason.
    """
    if asking.adapter is not None and (fault := known.adapter_fault(asking.model, asking.adapter)):
        raise refusals.adapter_fault(asking.model, asking.adapter, fault)


class Gone:
    """Adapters that somebody waits for and that are declared no more: nobody will ever load them."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def fault(self, known: standing.Standing, model: str, adapter: str | None, now: float) -> str:
        """Return why an adapter can't be served, as the broker says or as it is gone, or "".

        Args:
            known: what is known of the fleet.
            model: the model.
            adapter: what is waited for.
            now: monotonic seconds.
        """
        route = known.view.routes.get(model)
        if adapter is None or route is None or adapter in route.adapters:
            if self._since:
                self._since.pop((model, adapter or ""), None)
            return known.adapter_fault(model, adapter)
        since = self._since.setdefault((model, adapter), now)
        if now - since < GONE_S:  # who let the request in may know of a new adapter before we do
            return ""
        del self._since[model, adapter]
        return "it is declared no more"
