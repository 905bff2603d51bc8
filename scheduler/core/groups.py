"""Replicas that may take one kind of request, kept in the order of their work as that changes.

A decision among hundreds of replicas may not look at each: it asks for those with room, least work first,
or with so much KV cache free, and finds lists that are right already. A list entry is one integer, the
amount above the member's position, so that sorted lists of them are searched without a call.
"""

import functools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence

from scheduler.core.contenders import Member, claim, hash_of, highest, is_stale

SHIFT = 20  # bits of a position: a million replicas
AT = (1 << SHIFT) - 1
_NOT = -1
_MOST = 1 << 40  # tokens of KV cache: what an idle replica takes, and more than any has
_HINTS = 4096  # remembered by each group


class Pool:
    """All serving members of one version of a model that take one band's requests.

    A member has room here if a request of one sequence, with little to keep, would be let in.

    Attributes:
        members: sorted by replica id; a position is an index in this.
        at: position by id.
        batch: whether for batch, which leaves the reserved seats and whatever others hold.
        keys: by position, tokens of work above the position; below 0 without room.
        order: the keys of those with room, least work first.
        resting: positions of those with room that compute no prompt now.
        total: tokens of work of all members.
        newest: when anything new was heard of any, monotonic seconds.
        views: grows by one with each view.
    """

    __slots__ = (
        "_parts", "_rooms", "_tokens", "_watching", "at", "batch", "keys", "members", "newest", "order",
        "resting", "room", "total", "views",
    )  # fmt: skip

    def __init__(self, members: Sequence[Member], *, batch: bool) -> None:
        self.members = sorted(members, key=lambda member: member.replica_id)
        self.at = {member.replica_id: at for at, member in enumerate(self.members)}
        self.batch = batch
        self.views = 0
        self._parts: list[tuple[bytearray, list[int]]] = []
        self._watching: list[Callable[[], None]] = []
        for at, member in enumerate(self.members):
            watcher = functools.partial(self.moved, at)
            member.load.watchers += (watcher,)
            self._watching.append(watcher)
        self.refresh()

    def close(self) -> None:
        """Hear of its members' loads no more."""
        for member, watcher in zip(self.members, self._watching, strict=True):
            member.load.watchers = tuple(w for w in member.load.watchers if w is not watcher)

    def refresh(self) -> None:
        """Reckon anew: a view has changed what members have room for."""
        self.views += 1
        self.newest = max((member.heard_at for member in self.members), default=-math.inf)
        self._tokens = [member.load.tokens for member in self.members]
        self.total = sum(self._tokens)
        reckoned = [self._reckoned(at) for at in range(len(self.members))]
        self.keys = [key for key, _ in reckoned]
        self._rooms = [room for _, room in reckoned]
        self.order = sorted([key for key in self.keys if key >= 0])
        self.room = sorted(self._rooms[key & AT] for key in self.order)
        self.resting = {key & AT for key in self.order if not self.members[key & AT].load.prefill}
        for inside, order in self._parts:
            order[:] = [key for key in self.order if inside[key & AT]]

    def ordered(self, positions: Iterable[int]) -> Sequence[int]:
        """Return those of `order` that are at ``positions``; the list is kept right as `order` is."""
        inside = bytearray(len(self.members))
        for at in positions:
            inside[at] = 1
        order = [key for key in self.order if inside[key & AT]]
        self._parts.append((inside, order))
        return order

    def moved(self, at: int) -> None:
        """Take in that the load of the member at a position has changed."""
        held = self.members[at].load
        self.total += held.tokens - self._tokens[at]
        self._tokens[at] = held.tokens
        was, had = self.keys[at], self._rooms[at]
        key, room = self._reckoned(at)
        if key != was:
            self.keys[at] = key
            if was >= 0:
                del self.order[bisect_left(self.order, was)]
            if key >= 0:
                insort(self.order, key)
            for inside, order in self._parts:
                if inside[at]:
                    if was >= 0:
                        del order[bisect_left(order, was)]
                    if key >= 0:
                        insort(order, key)
        if room != had or (key < 0) != (was < 0):
            self._rooms[at] = room
            if was >= 0:
                del self.room[bisect_left(self.room, had)]
            if key >= 0:
                insort(self.room, room)
        if key >= 0 and not held.prefill:
            self.resting.add(at)
        else:
            self.resting.discard(at)

    def _reckoned(self, at: int) -> tuple[int, int]:
        """Return the key and the entry in `room` of the member at a position.

        Batch does not count against others' KV cache: the replica aborts it for them. An idle replica takes
        anything: what does not fit its KV cache at all is for the engine to refuse, in its own words.
        """
        member = self.members[at]
        held = member.load
        kv: float = _MOST
        full = held.prefill >= member.prefill_limit
        if self.batch:
            seated = held.urgent + held.batch
            full = full or seated >= min(member.batch_seats, member.batch_bound)
            if seated:
                kv = member.kv_limit - held.urgent_kv - held.batch_kv
        else:
            full = full or held.urgent >= member.seats
            if held.urgent:
                kv = member.kv_limit - held.urgent_kv
        room = _MOST if kv == _MOST else int(max(-_MOST, min(_MOST, kv)))
        return _NOT if full else held.tokens << SHIFT | at, room << SHIFT | at


class Group:
    """Those of a pool that may take one kind of request.

    Attributes:
        pool: all of the version's.
        members: sorted by replica id.
        named: positions in the pool by id.
        least_context: no member has less.
        longs: where long prompts go; all of them if the group is too small to set any apart.
        long_named: their positions in the pool by id.
    """

    __slots__ = (
        "_contexts", "_hints", "_inside", "_long_contexts", "_long_order", "_names", "_newest", "_positions",
        "_ranked", "_seen",
        "least_context", "long_named", "longs", "members", "named", "pool",
    )  # fmt: skip

    def __init__(self, pool: Pool, members: Sequence[Member], long_share: float) -> None:
        self.pool = pool
        self.members = sorted(members, key=lambda member: member.replica_id)
        self.named = {member.replica_id: pool.at[member.replica_id] for member in self.members}
        self._names = list(self.named)
        self._positions = list(self.named.values())
        self._inside: bytearray | None = None
        if len(self.members) < len(pool.members):
            self._inside = bytearray(len(pool.members))
            for at in self.named.values():
                self._inside[at] = 1
        count = max(1, math.ceil(len(self.members) * long_share))
        # The largest contexts first; among equals by hash, so that a restart moves little.
        ranked = sorted(self.members, key=lambda m: (-m.replica.spec.max_context, m.seed))
        self.longs = frozenset(member.replica_id for member in ranked[:count])
        self.long_named = {each.replica_id: self.named[each.replica_id] for each in ranked[:count]}
        self._long_order = None
        if self._inside is None:
            self._long_order = pool.ordered(self.long_named.values())
        self._contexts = sorted(member.replica.spec.max_context for member in self.members)
        self._long_contexts = sorted(m.replica.spec.max_context for m in ranked[:count])
        self.least_context = self._contexts[0]
        self._ranked: dict[str, list[int]] = {}
        self._hints: dict[int, int] = {}
        self._seen, self._newest = 0, -math.inf

    def __len__(self) -> int:
        """Return how many members there are."""
        return len(self.members)

    @property
    def total(self) -> int:
        """Tokens of work of all members."""
        if self._inside is None:
            return self.pool.total
        return sum([member.load.tokens for member in self.members])

    def fitting(self, context_tokens: int, *, long: bool) -> int:
        """Return how many members could take such a request if they were idle."""
        contexts = self._long_contexts if long else self._contexts
        return len(contexts) - bisect_left(contexts, context_tokens)

    def keys(self, kv_tokens: int, *, long: bool = False) -> Sequence[int]:
        """Return the keys of members with room, least work first.

        Args:
            kv_tokens: a need of KV cache; many of those that lack it are left out, not all.
            long: of those alone that long prompts go to.
        """
        if long:
            return (
                self.of(self.long_named.values()) if self._long_order is None else self._long_order
            )
        order, inside = self.pool.order, self._inside
        having = self.pool.room
        start = bisect_left(having, kv_tokens << SHIFT)
        if 4 * (len(having) - start) < len(order):
            keys = self.pool.keys
            few = [keys[entry & AT] for entry in having[start:]]
            few.sort()
            return few if inside is None else [key for key in few if inside[key & AT]]
        if inside is None:
            return order
        if 8 * len(self.members) < len(order):
            return self.of(self._positions)
        return [key for key in order if inside[key & AT]]

    def order(self, *, long: bool) -> Sequence[int] | None:
        """Return the keys of all members with room, least work first, where such a list is kept."""
        if long:
            return self._long_order
        return self.pool.order if self._inside is None else None

    def of(self, positions: Iterable[int]) -> list[int]:
        """Return the keys of those at ``positions`` that have room, least work first."""
        keys = self.pool.keys
        found = [key for at in positions if (key := keys[at]) >= 0]
        found.sort()
        return found

    def resting(self) -> Collection[int]:
        """Return the positions of those with room that compute no prompt now."""
        inside = self._inside
        if inside is None:
            return self.pool.resting
        return [at for at in self.pool.resting if inside[at]]

    def after(self, name: str) -> Sequence[int]:
        """Return the members' positions by id, from the first one after ``name`` on and around."""
        start = bisect_right(self._names, name)
        return self._positions[start:] + self._positions[:start]

    def highest(self, key: int) -> int:
        """Return the position of the member with the highest claim on a caller's key; remembered."""
        found = self._hints.get(key)
        if found is None:
            if len(self._hints) >= _HINTS:
                self._hints.clear()
            found = self._hints[key] = self.named[highest(self.members, key).replica_id]
        return found

    def ranked(self, name: str) -> list[int]:
        """Return the members' positions by their claim on ``name``; computed once for each name."""
        found = self._ranked.get(name)
        if found is None:
            key = hash_of(name)
            ranked = sorted(self.members, key=lambda member: -claim(member.seed, key))
            found = self._ranked[name] = [self.named[member.replica_id] for member in ranked]
        return found

    def stale(self, now: float) -> bool:
        """Whether nothing new was heard of any member for more than a second."""
        if self._seen != self.pool.views:
            self._seen = self.pool.views
            self._newest = max(member.heard_at for member in self.members)
        return is_stale(self._newest, now)
