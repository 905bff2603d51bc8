"""Routing with its memory: the fleet, the load, the prefix index and each adapter's share of the traffic.

One of these lives with the owner of the queues. Every call says what has happened and when; the object
decides and remembers, and does nothing else.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from scheduler.contracts import fleet, ids
from scheduler.core import candidates, load, popularity, prefixes, routing

INDEX_LIMIT = (
    500_000  # (replica, chunk) pairs a model: about 60 MB at most, see docs/bench/prefix.md
)


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """What the owner of the queues knows besides when it places a request.

    Attributes:
        now: monotonic seconds.
        dead: per replica, the newest incarnation that is known to be gone.
        full: replicas that said "full" a moment ago, to this band's kind of request.
    """

    now: float
    dead: Mapping[ids.ReplicaId, int] = dataclasses.field(default_factory=dict)
    full: AbstractSet[ids.ReplicaId] = frozenset()


class Placed(msgspec.Struct, frozen=True):
    """A request on its replica.

    Attributes:
        guard: its load there; whoever holds this closes it, whatever happens.
        reason: why it was this replica.
        prefix: the prompt's fingerprints.
        claimed: the share of the prompt that the replica was sure to hold.
    """

    replica: fleet.Replica
    guard: load.Guard
    reason: str
    prefix: prefixes.Prefix
    claimed: float


class Router:
    """Places requests.

    Args:
        loads: what is in flight.
        policy: how it weighs.
        chunk_bytes: size of a fingerprint's chunk, as the gateway makes them.
        limit: size of each model's prefix index, in (replica, chunk) pairs.
    """

    def __init__(
        self,
        loads: load.Loads,
        policy: routing.Policy = routing.DEFAULT,
        chunk_bytes: int = prefixes.CHUNK_BYTES,
        limit: int = INDEX_LIMIT,
    ) -> None:
        self.policy = policy
        self.loads = loads
        self.fleet = candidates.Fleet(self.loads, policy.long_share, policy.prefill_steps)
        self._chunk_bytes = chunk_bytes
        self._limit = limit
        self._indexes: dict[str, prefixes.Index] = {}
        self._popularity: dict[str, popularity.Popularity] = {}
        self._incarnations: dict[ids.ReplicaId, int] = {}
        self._after: dict[tuple[str, str], str] = {}

    def observe(self, replicas: Sequence[fleet.Replica], now: float) -> None:
        """Take in the newest view, received at monotonic second ``now``."""
        self.fleet.observe(replicas, now)
        for replica in replicas:
            index = self.index(replica.spec.model)
            name, stats = replica.replica_id, replica.stats
            if self._incarnations.get(name, replica.incarnation) != replica.incarnation:
                index.gone(name)
            if stats is not None and stats.kv_blocks:
                index.capacity(name, stats.kv_blocks, stats.kv_block_tokens)
        self._incarnations = {r.replica_id: r.incarnation for r in replicas}
        for index in self._indexes.values():
            index.keep(self._incarnations)

    def index(self, model: str) -> prefixes.Index:
        """Return a model's prefix index."""
        found = self._indexes.get(model)
        if found is None:
            found = self._indexes[model] = prefixes.Index(self._limit, self._chunk_bytes)
        return found

    def place(self, ask: routing.Ask, at: Moment, draw: float) -> Placed | None:
        """Choose a replica and count the request there; None where no replica can take it now.

        Args:
            ask: the request.
            at: what is known besides.
            draw: a random number in [0, 1) that breaks ties.
        """
        index = self.index(ask.model)
        if not ask.prompt_tokens and ask.prefix.size:
            ask = dataclasses.replace(ask, prompt_tokens=index.tokens(ask.prefix))
        situation = routing.Situation(
            self.fleet,
            at.now,
            index.holders(ask.prefix, self.policy.least_share),
            index.first_new(ask.prefix),
            self._share(ask),
            at.dead,
            at.full,
            draw,
            self._after.get((ask.model, ask.version), ""),
        )
        choice = routing.choose(ask, situation, self.policy)
        if choice is None:
            return None
        replica_id = choice.replica.replica_id
        if choice.reason is routing.STALE:
            self._after[ask.model, ask.version] = replica_id
        claimed = index.confirmed(ask.prefix, replica_id)
        index.dispatched(ask.prefix, replica_id)
        if ask.adapter is not None:
            self._popularity.setdefault(ask.model, popularity.Popularity()).note(ask.adapter)
        guard = self._open(ask, replica_id, choice.cached_share)
        return Placed(choice.replica, guard, choice.reason, ask.prefix, claimed)

    def adopt(self, ask: routing.Ask, replica_id: ids.ReplicaId) -> load.Guard:
        """Count a request on a replica, whatever room that has: it runs there already."""
        self.index(ask.model).dispatched(ask.prefix, replica_id)
        guard = self._open(ask, replica_id, 0.0)
        guard.prefilled()  # how far it is nobody says here; its first token may have come long ago
        return guard

    def _open(self, ask: routing.Ask, replica_id: ids.ReplicaId, cached_share: float) -> load.Guard:
        prefill = round(ask.prompt_tokens * (1 - cached_share))
        return self.loads.open(
            ask.model,
            replica_id,
            ask.tier,
            ask.seats,
            tokens=prefill + ask.output_tokens,
            prefill=prefill,
            kv_tokens=ask.kv_beside(cached_share),
        )

    def returned(self, placed: Placed, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn from the counts of a whole answer what its replica held, and holds now."""
        self.index(placed.guard.model).returned(
            placed.prefix,
            placed.replica.replica_id,
            placed.claimed,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )

    def _share(self, ask: routing.Ask) -> float:
        popular = self._popularity.get(ask.model)
        return popular.share(ask.adapter) if popular and ask.adapter is not None else 0.0
