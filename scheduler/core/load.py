"""What is in flight where, counted from dispatch to close by a guard and by nothing else.

Probes and statistics never touch these numbers: a counter that a scrape may reset forgets running
streams, and one that an error path forgets to give back makes a replica look full for ever.
"""

import collections
from collections.abc import Callable, Collection
from types import TracebackType

from scheduler.contracts import ids, requests


class Load:
    """What we have in flight on one replica; routing holds on to it and reads it at each decision.

    Attributes:
        urgent: seats that interactive and standard requests hold.
        batch: seats that batch holds.
        tokens: work: prompt tokens still to compute plus estimated output tokens, at least 1 a seat.
        prefill: of these, uncached prompt tokens of requests that have not begun to answer.
        urgent_kv: KV cache that interactive and standard requests come to hold, in tokens.
        batch_kv: the same for batch.
        watchers: called after each change.
    """

    __slots__ = ("batch", "batch_kv", "prefill", "tokens", "urgent", "urgent_kv", "watchers")

    def __init__(self) -> None:
        self.urgent = 0
        self.batch = 0
        self.tokens = 0
        self.prefill = 0
        self.urgent_kv = 0
        self.batch_kv = 0
        self.watchers: tuple[Callable[[], None], ...] = ()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight there."""
        counts = self.urgent, self.batch, self.tokens, self.prefill, self.urgent_kv, self.batch_kv
        return not any(counts)


class Guard:
    """One dispatched request; `close` gives its place back, however often it is called."""

    __slots__ = ("_loads", "kv_tokens", "model", "prefill", "replica_id", "seats", "tier", "tokens")

    def __init__(self, loads: "Loads", model: str, replica_id: ids.ReplicaId, tier: requests.Tier):
        self._loads: Loads | None = loads
        self.model = model
        self.replica_id = replica_id
        self.tier = tier
        self.seats = 0
        self.tokens = 0
        self.prefill = 0
        self.kv_tokens = 0

    @property
    def closed(self) -> bool:
        """Whether the place was given back."""
        return self._loads is None

    def close(self) -> None:
        """Give the place back; a second call does nothing."""
        loads, self._loads = self._loads, None
        if loads is not None:
            loads.release(self)

    def prefilled(self) -> None:
        """Note that its prompt has been computed, and is no work any more.

        A second call, or one after `close`, does nothing.
        """
        if not self.prefill or self._loads is None:
            return
        load = self._loads.at(self.replica_id)
        # Each seat stays counted as one token at least.
        done = min(self.prefill, self.tokens - self.seats)
        load.prefill -= self.prefill
        load.tokens -= done
        self.tokens -= done
        self.prefill = 0
        for moved in load.watchers:
            moved()

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
    """What one owner of queues has in flight: seats and tokens by replica, requests by model."""

    def __init__(self) -> None:
        self._replicas: dict[ids.ReplicaId, Load] = {}
        self._models: collections.Counter[tuple[str, requests.Tier]] = collections.Counter()

    def at(self, replica_id: ids.ReplicaId) -> Load:
        """Return a replica's load: the same object until `forget`, so that it may be kept."""
        found = self._replicas.get(replica_id)
        if found is None:
            found = self._replicas[replica_id] = Load()
        return found

    def open(
        self,
        model: str,
        replica_id: ids.ReplicaId,
        tier: requests.Tier,
        seats: int = 1,
        *,
        tokens: int = 0,
        prefill: int = 0,
        kv_tokens: int = 0,
    ) -> Guard:
        """Count one more request on ``replica_id`` until the returned guard is closed.

        Args:
            model: the served model.
            replica_id: where it is dispatched.
            tier: its tier.
            seats: sequences that it runs at once, at least 1.
            tokens: prompt tokens to compute there plus estimated output tokens; where they are not
                known each seat counts as one.
            prefill: of these, the prompt tokens to compute; counted until `Guard.prefilled`.
            kv_tokens: prompt and estimated output tokens that it will hold in the KV cache.

        Raises:
            ValueError: ``seats`` is below 1, or a count of tokens is negative.
        """
        if seats < 1 or min(tokens, prefill, kv_tokens) < 0:
            raise ValueError(
                f"a request holds at least one seat, not {seats}, and no negative tokens"
            )
        guard = Guard(self, model, replica_id, tier)
        guard.seats, guard.tokens, guard.kv_tokens = seats, max(tokens, seats), kv_tokens
        guard.prefill = prefill
        self._add(guard, 1)
        return guard

    def release(self, guard: Guard) -> None:
        """Take back what `open` counted; called by the guard, once."""
        self._add(guard, -1)

    def _add(self, guard: Guard, sign: int) -> None:
        load = self.at(guard.replica_id)
        load.tokens += sign * guard.tokens
        load.prefill += sign * guard.prefill
        if guard.tier is requests.Tier.BATCH:
            load.batch += sign * guard.seats
            load.batch_kv += sign * guard.kv_tokens
        else:
            load.urgent += sign * guard.seats
            load.urgent_kv += sign * guard.kv_tokens
        for moved in load.watchers:
            moved()
        key = (guard.model, guard.tier)
        self._models[key] += sign
        if not self._models[key]:
            del self._models[key]

    def forget(self, known: Collection[ids.ReplicaId]) -> None:
        """Drop what is kept of replicas that are not ``known`` and have nothing in flight."""
        gone = [name for name, load in self._replicas.items() if load.idle and name not in known]
        for name in gone:
            del self._replicas[name]

    def batch(self, replica_id: ids.ReplicaId) -> int:
        """Return the seats that batch in flight holds on a replica."""
        load = self._replicas.get(replica_id)
        return load.batch if load else 0

    def urgent(self, replica_id: ids.ReplicaId) -> int:
        """Return the seats that interactive and standard requests hold on a replica."""
        load = self._replicas.get(replica_id)
        return load.urgent if load else 0

    def tokens(self, replica_id: ids.ReplicaId) -> int:
        """Return the tokens of work in flight on a replica."""
        load = self._replicas.get(replica_id)
        return load.tokens if load else 0

    def total(self, replica_id: ids.ReplicaId) -> int:
        """Return every seat in use by us on a replica."""
        return self.batch(replica_id) + self.urgent(replica_id)

    def by_tier(self, model: str) -> dict[str, int]:
        """Return the model's requests in flight by tier, zeros included."""
        return {tier.value: self._models[model, tier] for tier in requests.Tier}

    @property
    def idle(self) -> bool:
        """Whether nothing at all is in flight."""
        return not self._models and all(load.idle for load in self._replicas.values())
