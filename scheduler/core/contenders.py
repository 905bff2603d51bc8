"""One replica as routing reads it: its newest view, and our own load on it. Pure: the time is an argument."""

import hashlib
import math
from collections.abc import Sequence

from scheduler.contracts import fleet
from scheduler.core import load

STALE_AFTER_S = 1.0  # statistics come each 200 ms; five in a row missing is an outage
PREFILL_STEPS = 2.0
STEP_TOKENS = (
    2048  # vLLM's own default for max-num-batched-tokens on small machines; 8,192 on large ones
)
ENDLESS = 1 << 30  # seats
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: Knuth's multiplicative hash


class Member:
    """One replica of a group: its newest view, and our own load on it.

    Attributes:
        replica: as the newest view has it.
        load: what we have in flight there.
        seats: sequences that it runs at once.
        batch_seats: of the seats, those that batch may have.
        batch_bound: seats in use by us at which the replica, as it said, lets no more batch in.
        others: seats that others held beyond what we did when its statistics came; endless where it
            was never heard of, since then nobody knows.
        kv_limit: tokens of KV cache that our requests may hold: all, less what others held when its
            statistics came; infinite where it does not say.
        prefill_limit: prompt tokens in flight and not yet computed from which it is given no more: what
            waits inside an engine waits in its order, not in that of bands, teams and deadlines.
        seed: its hash, for rendezvous.
        heard_at: monotonic seconds at which its statistics last changed; -inf means never.
    """

    __slots__ = (
        "batch_bound", "batch_seats", "heard_at", "kv_limit", "load", "others", "prefill_limit", "replica",
        "replica_id", "seats", "seed",
    )  # fmt: skip

    def __init__(
        self, replica: fleet.Replica, held: load.Load, prefill_steps: float = PREFILL_STEPS
    ) -> None:
        self.replica_id = replica.replica_id
        self.replica = replica
        self.load = held
        self.seats = self.batch_seats = replica.spec.seats
        self.batch_bound = ENDLESS
        self.kv_limit: float = math.inf
        self.prefill_limit = prefill_steps * step_tokens(replica.spec)
        self.seed = hash_of(replica.replica_id)
        self.heard_at = -math.inf
        self.others = ENDLESS

    def update(self, replica: fleet.Replica, now: float) -> None:
        """Take in a view that came at ``now``.

        The time stamp in the statistics is another machine's, so only its change is looked at: a view
        that keeps coming with frozen statistics is as stale as one that no longer comes.
        """
        before = self.replica.stats
        stats, self.replica, spec = replica.stats, replica, replica.spec
        self.seats = self.batch_seats = spec.seats
        if replica.role is not fleet.Role.BATCH:
            self.batch_seats -= spec.reserved_seats
        if stats is None:
            self.heard_at, self.kv_limit, self.others = -math.inf, math.inf, ENDLESS
            self.batch_bound = ENDLESS
        elif self.heard_at == -math.inf or before is None or before.at_us != stats.at_us:
            self.heard_at = now
            held = self.load
            others = max(0, stats.interactive - held.urgent), max(0, stats.batch - held.batch)
            self.others = sum(others)
            told = stats.batch_room
            self.batch_bound = told + held.urgent + held.batch if told >= 0 else ENDLESS
            self.kv_limit = self._kv_limit(stats)

    def _kv_limit(self, stats: fleet.ReplicaStats) -> float:
        size = stats.kv_blocks * stats.kv_block_tokens
        if size <= 0:
            return math.inf
        used = (stats.kv_blocks - stats.kv_free) * stats.kv_block_tokens
        return size - max(0, used - self.load.urgent_kv - self.load.batch_kv)

    def stale(self, now: float) -> bool:
        """Whether nothing new was heard of it for more than a second."""
        return is_stale(self.heard_at, now)


def claim(seed: int, key: int) -> int:
    """Return a member's claim on a key; the highest wins, and few keys move when one comes or goes."""
    return (seed ^ key) * _ODD & _MASK


def highest(some: Sequence[Member], key: int) -> Member:
    """Return the one with the highest claim on ``key``."""
    claims = [(member.seed ^ key) * _ODD & _MASK for member in some]
    return some[claims.index(max(claims))]


def is_stale(heard_at: float, now: float) -> bool:
    """Whether what was heard last is more than a second old."""
    return now - heard_at > STALE_AFTER_S


def step_tokens(spec: fleet.ReplicaSpec) -> float:
    """Return how many prompt tokens an engine computes in one step; infinite where nobody knows."""
    if spec.engine is fleet.EngineKind.HTTP:
        return math.inf
    asked = spec.engine_args.get("max-num-batched-tokens")
    return float(asked) if isinstance(asked, int) and asked > 0 else STEP_TOKENS


def hash_of(text: str) -> int:
    """Return 64 bits that every worker and host computes alike."""
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "big")
