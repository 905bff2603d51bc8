"""One view of the fleet, prepared for the questions that every request asks of it. Pure."""

from collections.abc import Iterable, Mapping

from gateway import refusals
from scheduler.contracts import errors, fleet, ids, requests
from scheduler.core import routing


class Standing:
    """What a view says of each model, worked out once for all requests that come under it.

    Attributes:
        view: the view.
        replicas: each model's replicas.
        outlooks: by model and version, whether it serves, comes, or not.
    """

    def __init__(self, view: fleet.FleetView) -> None:
        self.view = view
        self.replicas: dict[str, list[fleet.Replica]] = {}
        self.outlooks: dict[tuple[str, str], routing.Outlook] = {}
        for replica in view.replicas:
            self.replicas.setdefault(replica.spec.model, []).append(replica)
        for model, replicas in self.replicas.items():
            for version in {replica.spec.version for replica in replicas}:
                self.outlooks[model, version] = routing.outlook(replicas, model, version)
        self._most: dict[tuple[str, bool], int | None] = {}
        self._takes: dict[tuple[str, str, str | None, bool], bool] = {}

    def of(self, model: str) -> list[fleet.Replica]:
        """Return a model's replicas."""
        return self.replicas.get(model, [])

    def versions(self, model: str, replica_ids: Iterable[str]) -> frozenset[str]:
        """Return the versions of some of a model's replicas."""
        named = frozenset(replica_ids)
        return frozenset(
            replica.spec.version for replica in self.of(model) if replica.replica_id in named
        )

    def most_seats(self, model: str, tier: requests.Tier) -> int | None:
        """Return the most sequences that any replica of a model runs at once, None without any."""
        batch = tier is requests.Tier.BATCH
        if (model, batch) not in self._most:
            seats = [
                replica.spec.seats - (replica.spec.reserved_seats if batch else 0)
                for replica in self.of(model)
            ]
            self._most[model, batch] = max(seats, default=None)
        return self._most[model, batch]

    def takes(self, model: str, version: str, adapter: str | None, tier: requests.Tier) -> bool:
        """Return whether a serving replica of a version may take such a request."""
        batch = tier is requests.Tier.BATCH
        key = (model, version, adapter, batch)
        if key not in self._takes:
            never = fleet.Role.INTERACTIVE if batch else fleet.Role.BATCH
            self._takes[key] = any(
                replica.state is fleet.ReplicaState.SERVING
                and replica.spec.version == version
                and replica.role is not never
                and (adapter is None or adapter in replica.adapters_ready)
                for replica in self.of(model)
            )
        return self._takes[key]

    def wakes(self, model: str, version: str) -> bool:
        """Return whether waiting is what brings a version back from zero; that of batch starts nothing."""
        route = self.view.routes.get(model)
        return route is not None and version in route.wakes

    def hopes(self, model: str, version: str) -> bool:
        """Return whether a version is up, or comes, or waiting starts it: not one in quarantine at zero."""
        outlook = self.outlooks.get((model, version), routing.Outlook.NONE)
        return outlook is not routing.Outlook.NONE or self.wakes(model, version)

    def no_replica(self, model: str) -> errors.NoReplica:
        """Return what a request for a model is told that has no replica, and none coming."""
        route = self.view.routes.get(model)
        return refusals.no_replica(model, 0.0 if route is None else route.start_s)

    def adapter_fault(self, model: str, adapter: str | None) -> str:
        """Return why no replica can serve an adapter, or ""."""
        route = self.view.routes.get(model)
        return route.adapter_faults.get(adapter or "", "") if route is not None else ""

    def adapter_load_s(self, model: str) -> float:
        """Return how long a model's adapters took to load, at most, as far as its replicas say."""
        held = (one for replica in self.of(model) for one in replica.adapters or ())
        return max((one.load_ms / 1000 for one in held), default=0.0)

    def outlook(
        self, model: str, version: str | None, dead: Mapping[ids.ReplicaId, int]
    ) -> routing.Outlook:
        """Return whether waiting makes sense, replicas that are known as dead left out."""
        if version is not None and not dead:
            return self.outlooks.get((model, version), routing.Outlook.NONE)
        return routing.outlook(self.of(model), model, version, dead)


class Grace:
    """How long versions have been without any replica, and whether their requests wait in vain.

    Args:
        grace_s: a restart takes so long, and is no reason to fail.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._absent_since: dict[tuple[str, str], float] = {}

    def over(self, version: tuple[str, str], outlook: routing.Outlook, now: float) -> bool:
        """Return whether a model's version has had no replica, and none coming, for the whole time."""
        if outlook is not routing.Outlook.NONE:
            if self._absent_since:
                self._absent_since.pop(version, None)
            return False
        return now - self._absent_since.setdefault(version, now) >= self._grace_s
