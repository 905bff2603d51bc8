"""Whether a replica has room for a request now: asked of one member, or of many in one go. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from scheduler.contracts import ids
from scheduler.core.contenders import Member


@dataclasses.dataclass(slots=True)
class Wanted:
    """The room that a request needs, and who is passed over.

    Attributes:
        batch: it is of tier batch.
        seats: sequences that it runs at once.
        kv_tokens: KV cache that it will hold.
        context_tokens: 0 where every member has enough.
        now: monotonic seconds.
        pool: the replicas that it is kept to, None: any.
        full: replicas that said "full" a moment ago.
        dead: per replica, the newest incarnation that is known to be gone.
        resting: whether those that compute no prompt now may take it; otherwise they are others'.
    """

    batch: bool
    seats: int
    kv_tokens: int
    context_tokens: int
    now: float
    pool: AbstractSet[ids.ReplicaId] | None
    full: AbstractSet[ids.ReplicaId]
    dead: Mapping[ids.ReplicaId, int]
    resting: bool = True

    def has(self, member: Member) -> bool:
        """Whether a member has room."""
        held, seats, kv = member.load, self.seats, self.kv_tokens
        if held.prefill >= member.prefill_limit:
            return False
        if self.batch:
            if batch_room(member, self.now) < seats:
                return False
            if held.urgent_kv + held.batch_kv + kv > member.kv_limit and (
                held.urgent or held.batch
            ):
                return False
        elif held.urgent + seats > member.seats or (
            # Batch does not count: the replica aborts it for us (rung 0).
            held.urgent_kv + kv > member.kv_limit and held.urgent
        ):
            return False
        name = member.replica_id
        return not (
            name in self.full
            or (self.pool is not None and name not in self.pool)
            or (not self.resting and not held.prefill)
            or self.context_tokens > member.replica.spec.max_context
            or (self.dead and member.replica.incarnation <= self.dead.get(name, -1))
        )

    def those(self, members: Iterable[Member]) -> list[Member]:
        """Return those of ``members`` that have room, in their order: `has`, at a third of its cost each."""
        seats, kv, now = self.seats, self.kv_tokens, self.now
        if self.full:
            full = self.full
            members = [m for m in members if m.replica_id not in full]
        if self.batch:
            able = [
                m
                for m in members
                if (held := m.load).prefill < m.prefill_limit
                and batch_room(m, now) >= seats
                and (
                    held.urgent_kv + held.batch_kv + kv <= m.kv_limit
                    or not (held.urgent or held.batch)
                )
            ]
        else:
            able = [
                m
                for m in members
                if (held := m.load).urgent + seats <= m.seats
                and held.prefill < m.prefill_limit
                and (held.urgent_kv + kv <= m.kv_limit or not held.urgent)
            ]
        if self.pool is not None:
            pool = self.pool
            able = [m for m in able if m.replica_id in pool]
        if not self.resting:
            able = [m for m in able if m.load.prefill]
        if self.context_tokens:
            able = [m for m in able if self.context_tokens <= m.replica.spec.max_context]
        if self.dead:
            dead = self.dead
            able = [m for m in able if m.replica.incarnation > dead.get(m.replica_id, -1)]
        return able


def batch_room(member: Member, now: float) -> int:
    """Return how many more seats batch may take on a replica.

    With fresh statistics our own count decides and the replica corrects it. With stale ones batch never
    adds more than the seats that are known to be free: what others held when they came counts as held
    still. A replica that was never heard of gets none. One that says how much batch it would let in (it
    knows how fast its steps are) is believed, what came and went since then counted in.
    """
    held = member.load
    left = min(member.batch_seats, member.batch_bound) - held.urgent - held.batch
    return left - member.others if member.stale(now) else left
