"""The fleet as routing reads it: made ready when a view comes, so that a decision builds nothing.

A group holds the replicas that a kind of request may go to as far as that changes only with a view
(model, version, adapter, role, state); what changes with each request (load, room, marks) is read from
the members by the decision itself. Pure: the time is an argument.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence

from scheduler.contracts import fleet, ids
from scheduler.core import load

STALE_AFTER_S = 1.0  # statistics come each 200 ms; five in a row missing is an outage
PREFILL_STEPS = 2.0
STEP_TOKENS = (
    2048  # vLLM's own default for max-num-batched-tokens on small machines; 8,192 on large ones
)
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: Knuth's multiplicative hash


class Member:
    """One replica: its newest view, and our own load on it.

    Attributes:
        replica: as the newest view has it.
        load: what we have in flight there.
        seats: sequences that it runs at once.
        kv_limit: tokens of KV cache that our requests may hold: all, less what others held when its
            statistics came; infinite where it does not say.
        prefill_limit: prompt tokens in flight and not yet computed from which it is given no more: what
            waits inside an engine waits in its order, not in that of bands, teams and deadlines.
        seed: its hash, for rendezvous.
        heard_at: monotonic seconds at which its statistics last changed; -inf means never.
        heard_urgent, heard_batch: seats that we held there at that time.
    """

    __slots__ = (
        "heard_at", "heard_batch", "heard_urgent", "kv_limit", "load", "prefill_limit", "replica",
        "replica_id", "seats", "seed",
    )  # fmt: skip

    def __init__(
        self, replica: fleet.Replica, held: load.Load, prefill_steps: float = PREFILL_STEPS
    ) -> None:
        self.replica_id = replica.replica_id
        self.replica = replica
        self.load = held
        self.seats = replica.spec.seats
        self.kv_limit = math.inf
        self.prefill_limit = prefill_steps * step_tokens(replica.spec)
        self.seed = hash_of(replica.replica_id)
        self.heard_at = -math.inf
        self.heard_urgent = 0
        self.heard_batch = 0

    def update(self, replica: fleet.Replica, now: float) -> None:
        """Take in a view that came at ``now``.

        The time stamp in the statistics is another machine's, so only its change is looked at: a view
        that keeps coming with frozen statistics is as stale as one that no longer comes.
        """
        before = self.replica.stats
        stats, self.replica = replica.stats, replica
        self.seats = replica.spec.seats
        if stats is None:
            self.heard_at, self.kv_limit = -math.inf, math.inf
        elif self.heard_at == -math.inf or before is None or before.at_us != stats.at_us:
            self.heard_at = now
            self.heard_urgent, self.heard_batch = self.load.urgent, self.load.batch
            self.kv_limit = self._kv_limit(stats)

    def _kv_limit(self, stats: fleet.ReplicaStats) -> float:
        size = stats.kv_blocks * stats.kv_block_tokens
        if not size:
            return math.inf
        used = (stats.kv_blocks - stats.kv_free) * stats.kv_block_tokens
        return size - max(0, used - self.load.urgent_kv - self.load.batch_kv)

    def stale(self, now: float) -> bool:
        """Whether nothing new was heard of it for more than a second."""
        return now - self.heard_at > STALE_AFTER_S

    def claim(self, key: int) -> int:
        """Return its claim on a key; the highest wins, and few keys move when a replica comes or goes."""
        return (self.seed ^ key) * _ODD & _MASK


class Group:
    """Replicas that may take one kind of request.

    Attributes:
        members: sorted by replica id.
        loads, seeds: theirs, in the same order.
        named: members by id.
        least_context: no member has less.
        longs: where long prompts go; all of them if the group is too small to set any apart.
    """

    __slots__ = ("_ranked", "least_context", "loads", "longs", "members", "named", "seeds")

    def __init__(self, members: Sequence[Member], long_share: float) -> None:
        self.members = sorted(members, key=lambda member: member.replica_id)
        self.named = {member.replica_id: member for member in self.members}
        self.loads = [member.load for member in self.members]
        self.seeds = [member.seed for member in self.members]
        self.least_context = min(member.replica.spec.max_context for member in self.members)
        count = max(1, math.ceil(len(self.members) * long_share))
        # The largest contexts first; among equals by hash, so that a restart moves little.
        ranked = sorted(self.members, key=lambda m: (-m.replica.spec.max_context, m.seed))
        self.longs = frozenset(member.replica_id for member in ranked[:count])
        self._ranked: dict[str, list[Member]] = {}

    def highest(self, key: int) -> Member:
        """Return the member with the highest claim on ``key``."""
        claims = [(seed ^ key) * _ODD & _MASK for seed in self.seeds]
        return self.members[claims.index(max(claims))]

    def ranked(self, name: str) -> list[Member]:
        """Return the members by their claim on ``name``; computed once for each name."""
        found = self._ranked.get(name)
        if found is None:
            key = hash_of(name)
            found = sorted(self.members, key=lambda member: -member.claim(key))
            self._ranked[name] = found
        return found

    def stale(self, now: float) -> bool:
        """Whether nothing new was heard of any member for more than a second."""
        return all(member.stale(now) for member in self.members)


class Fleet:
    """Every serving replica, in groups.

    Args:
        loads: what we have in flight.
        long_share: part of a group's replicas that take long prompts.
        prefill_steps: steps of a replica's engine that it is given prompts for ahead.
    """

    def __init__(
        self,
        loads: load.Loads,
        long_share: float = 0.25,
        prefill_steps: float = PREFILL_STEPS,
    ) -> None:
        self._loads = loads
        self._long_share = long_share
        self._prefill_steps = prefill_steps
        self._members: dict[ids.ReplicaId, Member] = {}
        self._groups: dict[tuple[str, str, str | None, bool], Group] = {}
        self._shapes: tuple[object, ...] = ()

    def observe(self, replicas: Iterable[fleet.Replica], now: float) -> None:
        """Take in the newest view, received at monotonic second ``now``."""
        members: dict[ids.ReplicaId, Member] = {}
        for replica in replicas:
            member = self._members.get(replica.replica_id)
            if member is None or member.replica.incarnation != replica.incarnation:
                member = Member(replica, self._loads.at(replica.replica_id), self._prefill_steps)
            member.update(replica, now)
            members[replica.replica_id] = member
        self._members = members
        self._loads.forget(members.keys())
        shapes = tuple(_shape(member.replica) for member in members.values())
        if shapes != self._shapes:
            self._shapes = shapes
            self._regroup()

    def members(self) -> Iterable[Member]:
        """Return every replica of the newest view."""
        return self._members.values()

    def member(self, replica_id: ids.ReplicaId) -> Member | None:
        """Return a replica of the newest view."""
        return self._members.get(replica_id)

    def group(self, model: str, version: str, adapter: str | None, *, batch: bool) -> Group | None:
        """Return the replicas that serve this kind of request, or None if there is none."""
        return self._groups.get((model, version, adapter, batch))

    def _regroup(self) -> None:
        """Sort serving replicas into groups; those with the same members are one object."""
        lists: dict[tuple[str, str, str | None, bool], list[Member]] = {}
        for member in self._members.values():
            replica = member.replica
            if replica.state is not fleet.ReplicaState.SERVING or not replica.address:
                continue
            spec, role = replica.spec, replica.role
            takes = [False] if role is not fleet.Role.BATCH else []
            takes += [True] if role is not fleet.Role.INTERACTIVE else []
            for batch in takes:
                for adapter in (None, *spec.adapters):
                    lists.setdefault((spec.model, spec.version, adapter, batch), []).append(member)
        made: dict[tuple[ids.ReplicaId, ...], Group] = {}
        self._groups = {}
        for key, members in lists.items():
            names = tuple(member.replica_id for member in members)
            if names not in made:
                made[names] = Group(members, self._long_share)
            self._groups[key] = made[names]


def step_tokens(spec: fleet.ReplicaSpec) -> float:
    """Return how many prompt tokens an engine computes in one step; infinite where nobody knows."""
    if spec.engine is fleet.EngineKind.HTTP:
        return math.inf
    asked = spec.engine_args.get("max-num-batched-tokens")
    return float(asked) if isinstance(asked, int) and asked > 0 else STEP_TOKENS


def _shape(replica: fleet.Replica) -> tuple[object, ...]:
    """Return what decides a replica's groups, cheap to compare."""
    spec = replica.spec
    return (
        replica.replica_id,
        replica.incarnation,
        replica.state,
        replica.role,
        replica.address,
        spec.model,
        spec.version,
        spec.max_context,
        spec.adapters,
    )


def hash_of(text: str) -> int:
    """Return 64 bits that every worker and host computes alike."""
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "big")


@dataclasses.dataclass(slots=True)
class Popularity:
    """How much of a model's traffic each adapter has had of late; old requests fade.

    Attributes:
        counts: decayed requests by adapter.
        total: their sum.
    """

    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    total: float = 0.0
    _since: int = 0
    _HALVE_AFTER = 1024  # requests

    def note(self, adapter: str) -> None:
        """Count one request."""
        self.counts[adapter] = self.counts.get(adapter, 0.0) + 1.0
        self.total += 1.0
        self._since += 1
        if self._since >= self._HALVE_AFTER:
            self._since = 0
            self.counts = {name: n / 2 for name, n in self.counts.items() if n >= 1.0}
            self.total = sum(self.counts.values())

    def share(self, adapter: str) -> float:
        """Return the adapter's part of the traffic, in [0, 1]."""
        return self.counts.get(adapter, 0.0) / self.total if self.total else 0.0
