"""Which replica of a pool holds which adapters: where another copy is loaded, and what goes for it. Pure.

A pool is one version of a model. Needs come first: an adapter that somebody waits for and no replica has.
Then popularity: as many copies as an adapter's part of the traffic fills, as routing reckons it. What nobody
asks for stays while there is room. What goes is the copy that is missed least: its part of the traffic times
its load time, over the time that nobody has used it.

A copy with running sequences never goes for another one, save where somebody has waited for `turn_s` and
every copy in the way is busy all along: then the one that was there longest takes nothing new, ends what it
has, and goes. Each in turn gets as long, so that more adapters than fit are all served.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from scheduler.contracts import ids, loras
from scheduler.core import contenders

_S = loras.AdapterState


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """How adapters are placed.

    Attributes:
        factor: copies beyond an adapter's part of the traffic, as `routing.Policy.factor`.
        stay_s: a fresh copy waits so long for its first request before it may go.
        turn_s: who waits for so long gets room even where all is busy.
        fade_s: unused for so long, a copy is worth half.
        gain: a copy goes for a more popular one only if that is worth so many times as much: else two
            adapters of like popularity would take each other's place for ever.
    """

    factor: float = 1.25
    stay_s: float = 2.0
    turn_s: float = 2.0
    fade_s: float = 10.0
    gain: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """An adapter on one replica.

    Attributes:
        running: its sequences there.
        uses: requests that have ended on it.
        idle_s: seconds since the last of them ended, or since it was there.
        since_s: seconds since it was ordered.
    """

    name: str
    path: str
    state: loras.AdapterState
    running: int = 0
    uses: int = 0
    idle_s: float = 0.0
    since_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """A serving replica of the pool.

    Attributes:
        room: adapters that it may hold.
        copies: those that it has, in any state.
        told: what it was told to hold, the most urgent first; None: it was not told yet, and keeps its own.
    """

    replica_id: ids.ReplicaId
    room: int
    copies: tuple[Copy, ...] = ()
    told: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """An adapter that the pool may hold.

    Attributes:
        share: its part of the model's requests for adapters, in [0, 1].
        waiting: requests that wait for it.
        oldest_s: seconds that the first of them has waited.
        preload: one copy is held whether anybody asks or not.
        cost_s: seconds that loading it takes, as far as known.
    """

    name: str
    path: str
    share: float = 0.0
    waiting: int = 0
    oldest_s: float = 0.0
    preload: bool = False
    cost_s: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is newly told to a replica of one adapter, and why."""

    replica_id: ids.ReplicaId
    name: str
    load: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a pool's replicas hold.

    Attributes:
        told: by replica, adapter to path, the most urgent first.
        changes: against what they were told before.
        notes: why one is not loaded that somebody waits for, one line each.
    """

    told: Mapping[ids.ReplicaId, Mapping[str, str]]
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


def decide(
    holders: Sequence[Holder], wishes: Sequence[Wish], policy: Policy | None = None
) -> Decision:
    """Return what each replica of a pool should hold.

    Args:
        holders: its serving replicas.
        wishes: the adapters that it may hold; what else a replica has goes.
        policy: how it weighs.
    """
    at = _Pool(holders, wishes, policy or Policy())
    order = sorted(
        wishes, key=lambda w: (not w.waiting, -w.oldest_s, not w.preload, -w.share, w.name)
    )
    for wish in order:
        if wish.waiting and not at.copies(wish.name):
            at.first(wish)
    swaps = True
    for wish in order:
        for _ in range(at.wanted(wish) - at.copies(wish.name)):
            if at.another(wish, swaps=swaps):
                continue
            swaps &= not wish.share  # what is asked for less has nobody who would go for it either
            break
    return at.decision(order)


class _Pool:
    """What is told so far, while it is decided."""

    def __init__(self, holders: Sequence[Holder], wishes: Sequence[Wish], policy: Policy) -> None:
        self._policy = policy
        self._wishes = {wish.name: wish for wish in wishes}
        self._holders = {holder.replica_id: holder for holder in sorted(holders, key=_id)}
        self._has = {
            holder.replica_id: {copy.name: copy for copy in holder.copies}
            for holder in self._holders.values()
        }
        self._told = {name: self._kept(holder) for name, holder in self._holders.items()}
        self._count = collections.Counter(name for told in self._told.values() for name in told)
        self._reasons: dict[tuple[ids.ReplicaId, str], str] = {}
        self._notes: list[str] = []

    def _kept(self, holder: Holder) -> dict[str, str]:
        """Return what a replica was told, or has, as far as it may have it."""
        there = {copy.name: copy for copy in holder.copies}
        before = holder.told
        if before is None:
            alive = {_S.LOADED, _S.LOADING}
            before = {copy.name: copy.path for copy in holder.copies if copy.state in alive}
        kept: dict[str, str] = {}
        for name, path in before.items():
            wish, copy = self._wishes.get(name), there.get(name)
            failed = copy is not None and copy.state is _S.FAILED and copy.path == path
            if wish is not None and wish.path == path and not failed and len(kept) < holder.room:
                kept[name] = path
        return kept

    def copies(self, name: str) -> int:
        """Return how many replicas are told to hold an adapter."""
        return self._count[name]

    def wanted(self, wish: Wish) -> int:
        """Return how many should: as many as its part of the traffic fills."""
        if not (wish.waiting or wish.share > 0 or wish.preload):
            return 0
        wide = round(wish.share * self._policy.factor * len(self._holders))
        return min(len(self._holders), max(1, wide))

    def first(self, wish: Wish) -> None:
        """Find room for an adapter that somebody waits for and nobody has."""
        reason = f"{wish.waiting} wait for it"
        if self._beside(wish, reason):
            return
        found = [
            (self._worth(copy), holder, copy)
            for holder, copy in self._there(wish)
            if self._free(copy)
        ]
        if found:
            _, holder, copy = min(found, key=lambda one: (one[0], one[2].name, one[1].replica_id))
            self._swap(wish, holder, copy, reason, "was used least")
            return
        if wish.oldest_s >= self._policy.turn_s and self._turn(wish, reason):
            return
        why = "every adapter there is in use" if self._rooms() else "no replica takes adapters"
        self._notes.append(f"adapter {wish.name}: {wish.waiting} wait, {why}")

    def another(self, wish: Wish, *, swaps: bool) -> bool:
        """Find room for one more copy, where that costs less than it brings; returns whether it has."""
        reason = (
            "is preloaded" if wish.preload and not wish.share else f"{wish.share:.0%} of requests"
        )
        if self._beside(wish, reason):
            return True
        if not swaps:
            return False
        brings = wish.share * wish.cost_s / (1 + self.copies(wish.name))
        found = [
            (self._worth(copy), holder, copy)
            for holder, copy in self._there(wish)
            if self._free(copy) and copy.idle_s >= self._policy.stay_s
        ]
        if not found:
            return False
        _, holder, copy = min(found, key=lambda one: (one[0], one[2].name, one[1].replica_id))
        if self._missed(copy) * self._policy.gain >= brings:
            return False
        self._swap(wish, holder, copy, reason, "is asked for less")
        return True

    def _turn(self, wish: Wish, reason: str) -> bool:
        """Let the busy copy that was there longest end for a waiter's sake."""
        busy = [
            (holder, copy)
            for holder, copy in self._there(wish)
            if copy.state is _S.LOADED and copy.since_s >= self._policy.turn_s
        ]
        if not busy:
            return False
        holder, copy = max(busy, key=lambda one: (one[1].since_s, one[1].name, one[0].replica_id))
        self._swap(wish, holder, copy, reason, "had its turn")
        return True

    def _beside(self, wish: Wish, reason: str) -> bool:
        """Load it where there is room, the replica with the fewest others first."""
        free = [
            holder
            for holder in self._holders.values()
            if wish.name not in self._told[holder.replica_id]
            and len(self._told[holder.replica_id]) < holder.room
            and not self._failed(wish, holder)
        ]
        if not free:
            return False
        key = contenders.hash_of(wish.name)
        best = min(
            free,
            key=lambda holder: (
                len(self._told[holder.replica_id]),
                -contenders.claim(contenders.hash_of(holder.replica_id), key),
            ),
        )
        self._load(wish, best, reason)
        return True

    def _there(self, wish: Wish) -> Iterator[tuple[Holder, Copy]]:
        """Yield what could go for an adapter: copies that a replica is told to hold and has."""
        for replica_id, told in self._told.items():
            holder = self._holders[replica_id]
            if wish.name in told or self._failed(wish, holder):
                continue
            for name in told:
                copy = self._has[replica_id].get(name)
                if copy is not None and copy.path == told[name]:
                    yield holder, copy

    def _failed(self, wish: Wish, holder: Holder) -> bool:
        copy = self._has[holder.replica_id].get(wish.name)
        return copy is not None and copy.state is _S.FAILED and copy.path == wish.path

    def _free(self, copy: Copy) -> bool:
        """Whether a copy may go at once: nothing runs on it, nobody waits for it, it had its chance."""
        if copy.state is not _S.LOADED or copy.running:
            return False
        if not copy.uses and copy.idle_s < self._policy.stay_s:
            return False
        return not (self._wishes[copy.name].waiting and self.copies(copy.name) == 1)

    def _worth(self, copy: Copy) -> tuple[float, float, float]:
        """Return what a copy is worth: what a miss would cost, fading while nobody uses it.

        Hyperbolic caching (Blankstein, Sen, Freedman, 2017): of two that are asked for alike it is the longer
        unused one that goes, however their load times scatter.
        """
        fading = 1.0 + copy.idle_s / self._policy.fade_s
        return (self._missed(copy) / fading, -float(self.copies(copy.name)), -copy.idle_s)

    def _missed(self, copy: Copy) -> float:
        """Return what a request for anything costs on average if a copy goes, in seconds."""
        wish = self._wishes[copy.name]
        return wish.share * wish.cost_s / self.copies(copy.name)

    def _rooms(self) -> bool:
        return any(holder.room for holder in self._holders.values())

    def _swap(self, wish: Wish, holder: Holder, copy: Copy, reason: str, why: str) -> None:
        del self._told[holder.replica_id][copy.name]
        self._count[copy.name] -= 1
        self._reasons[holder.replica_id, copy.name] = f"{why}, room for {wish.name}"
        self._load(wish, holder, reason)

    def _load(self, wish: Wish, holder: Holder, reason: str) -> None:
        self._told[holder.replica_id][wish.name] = wish.path
        self._count[wish.name] += 1
        self._reasons[holder.replica_id, wish.name] = reason

    def decision(self, order: Sequence[Wish]) -> Decision:
        """Return what is told, the most urgent first, and what of it is new."""
        urgency = {wish.name: at for at, wish in enumerate(order)}
        told: dict[ids.ReplicaId, Mapping[str, str]] = {}
        changes: list[Change] = []
        for replica_id, names in self._told.items():
            told[replica_id] = {
                name: names[name] for name in sorted(names, key=urgency.__getitem__)
            }
            before = self._holders[replica_id].told or {}
            for name in sorted(before.keys() - names.keys()):
                why = self._reasons.get((replica_id, name), "is not declared, or does not load")
                changes.append(Change(replica_id, name, False, why))
            for name in sorted(names.keys() - before.keys()):
                why = self._reasons.get((replica_id, name), "is there")
                changes.append(Change(replica_id, name, True, why))
        return Decision(told, tuple(changes), tuple(self._notes))


def _id(holder: Holder) -> str:
    return holder.replica_id
