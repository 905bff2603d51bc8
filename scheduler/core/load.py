"""What is in flight where, counted from dispatch to close by a guard and by nothing else.

Probes and statistics never touch these numbers: a counter that a scrape may reset forgets running
streams, and one that an error path forgets to give back makes a replica look full for ever.
"""

import collections
from types import TracebackType
from typing import TypeVar

from scheduler.contracts import ids, requests

_Key = TypeVar("_Key")


class Guard:
    """One dispatched request; `close` gives its place back, however often it is called."""

    __slots__ = ("_loads", "model", "replica_id", "seats", "tier")

    def __init__(
        self,
        loads: "Loads",
        model: str,
        replica_id: ids.ReplicaId,
        tier: requests.Tier,
        seats: int,
    ) -> None:
        self._loads: Loads | None = loads
        self.model = model
        self.replica_id = replica_id
        self.tier = tier
        self.seats = seats

    @property
    def closed(self) -> bool:
        """Whether the place was given back."""
        return self._loads is None

    def close(self) -> None:
        """Give the place back; a second call does nothing."""
        loads, self._loads = self._loads, None
        if loads is not None:
            loads.release(self)

    def __enter__(self) -> "Guard":
        """Return itself: the place is held until the block ends."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the place back, cancelled or not."""
        self.close()


class Loads:
    """What one gateway worker has in flight: seats by replica, requests by model."""

    def __init__(self) -> None:
        self._replicas: collections.Counter[tuple[ids.ReplicaId, requests.Tier]] = (
            collections.Counter()
        )
        self._models: collections.Counter[tuple[str, requests.Tier]] = collections.Counter()

    def open(
        self, model: str, replica_id: ids.ReplicaId, tier: requests.Tier, seats: int = 1
    ) -> Guard:
        """Count one more request on ``replica_id`` until the returned guard is closed.

        Args:
            model: the served model.
            replica_id: where it is dispatched.
            tier: its tier.
            seats: sequences that it runs at once, at least 1.

        Raises:
            ValueError: ``seats`` is below 1.
        """
        if seats < 1:
            raise ValueError(f"a request holds at least one seat, not {seats}")
        self._replicas[replica_id, tier] += seats
        self._models[model, tier] += 1
        return Guard(self, model, replica_id, tier, seats)

    def release(self, guard: Guard) -> None:
        """Take back what `open` counted; called by the guard, once."""
        _subtract(self._replicas, (guard.replica_id, guard.tier), guard.seats)
        _subtract(self._models, (guard.model, guard.tier), 1)

    def batch(self, replica_id: ids.ReplicaId) -> int:
        """Return the seats that batch in flight holds on a replica."""
        return self._replicas[replica_id, requests.Tier.BATCH]

    def urgent(self, replica_id: ids.ReplicaId) -> int:
        """Return the seats that interactive and standard requests hold on a replica."""
        return sum(
            self._replicas[replica_id, tier]
            for tier in requests.Tier
            if tier is not requests.Tier.BATCH
        )

    def total(self, replica_id: ids.ReplicaId) -> int:
        """Return every seat in use by us on a replica."""
        return self.batch(replica_id) + self.urgent(replica_id)

    def by_tier(self, model: str) -> dict[str, int]:
        """Return the model's requests in flight by tier, zeros included."""
        return {tier.value: self._models[model, tier] for tier in requests.Tier}

    @property
    def idle(self) -> bool:
        """Whether nothing at all is in flight."""
        return not self._replicas


def _subtract(counter: collections.Counter[_Key], key: _Key, count: int) -> None:
    """Drop the key at zero, so that replicas that are gone leave nothing behind."""
    counter[key] -= count
    if counter[key] == 0:
        del counter[key]
