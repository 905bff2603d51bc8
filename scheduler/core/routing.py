"""Which replica takes a request: filters say who may, scorers in [0, 1] who should, a picker who does.

Pure: the random numbers, the time, the load and who holds which prefix are arguments. Filters that
change only with a view are settled in `candidates`; those here look at what changes with each request.
"""

import bisect
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from scheduler.contracts import fleet, ids, requests
from scheduler.core import candidates, contenders, groups, holders, prefixes, room


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """How routing weighs.

    Attributes:
        factor: bounded load: a replica keeps its prefixes up to this multiple of the mean load (Mirrokni,
            Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads; they show 1.25 to move little).
        slack_tokens: a replica with less work than this is never saturated: what its engine takes into
            its next step or two (vLLM's max-num-batched-tokens is 2,048 to 8,192) costs no waiting.
        least_share: a cached prefix that is a smaller part of the prompt attracts nothing: else a system
            prompt that all share would draw every new conversation to the replica that had it first.
        long_share: part of a model's replicas that are this pool.
        prefill_steps: see `contenders.Member.prefill_limit`.
    """

    factor: float = 1.25
    slack_tokens: int = 2048
    least_share: float = 0.1
    long_share: float = 0.25
    prefill_steps: float = contenders.PREFILL_STEPS


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What a request needs of a replica.

    Attributes:
        context_tokens: prompt plus output, as far as known; 0 if not known.
        seats: sequences that it runs at once.
        prompt_tokens: the prompt, estimated; 0 if not known.
        output_tokens: what its sequences will sample together, estimated; 0 if not known.
        room_tokens: KV cache that it will come to hold; 0: prompt and output.
        long: whether it belongs in the long-context pool.
        left: part of the replicas that it leaves free of its prompts for others, rounded down.
        prefix: the prompt's fingerprints.
        hint: the caller's key for requests that share a prefix, or None.
    """

    model: str
    version: str
    tier: requests.Tier
    adapter: str | None = None
    context_tokens: int = 0
    seats: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0
    room_tokens: int = 0
    long: bool = False
    left: float = 0.0
    prefix: prefixes.Prefix = prefixes.NONE
    hint: str | None = None

    @property
    def kv_tokens(self) -> int:
        """KV cache that it will come to hold, in tokens."""
        whole = (self.prompt_tokens + self.output_tokens) if self.prompt_tokens else 0
        return self.room_tokens or whole

    def kv_beside(self, cached_share: float) -> int:
        """KV cache that it comes to hold beside a part of its prompt that is there, in tokens."""
        # The prefix of an interactive request may be in nobody's use: it must find its cache all the same.
        if self.tier is not requests.Tier.BATCH:
            return self.kv_tokens
        return max(0, self.kv_tokens - int(cached_share * self.prompt_tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a request is to be placed.

    Attributes:
        fleet: the newest view, made ready.
        now: monotonic seconds.
        held: who is thought to hold how much of the prompt.
        key: the first fingerprint of the prompt that nobody holds, or None without fingerprints.
        adapter_share: part of the model's traffic that asks for this adapter.
        dead: per replica, the newest incarnation that is known to be gone.
        full: replicas that said "full" a moment ago, to this band's kind of request.
        draw: a random number in [0, 1) that breaks ties.
        after: whom the last request without statistics went to, for round-robin.
    """

    fleet: candidates.Fleet
    now: float = 0.0
    held: holders.Holders = holders.NOBODY
    key: int | None = None
    adapter_share: float = 0.0
    dead: Mapping[ids.ReplicaId, int] = dataclasses.field(default_factory=dict)
    full: AbstractSet[ids.ReplicaId] = frozenset()
    draw: float = 0.0
    after: str = ""


class Choice(msgspec.Struct, frozen=True):
    """The replica, why it was it, and the part of the prompt that it is thought to hold."""

    replica: fleet.Replica
    reason: str
    cached_share: float = 0.0


_FEW_HOLDERS = 4
_ONE_BY_ONE = 16  # members looked at each for itself; from there on in one go
STALE = "round-robin: stale statistics"


class Outlook(enum.StrEnum):
    """Whether waiting for a model makes sense."""

    SERVING = "serving"
    COMING = "coming"
    NONE = "none"


def outlook(
    replicas: Sequence[fleet.Replica],
    model: str,
    version: str | None,
    dead: Mapping[ids.ReplicaId, int] | None = None,
) -> Outlook:
    """Return whether a replica of ``model`` (and ``version``, if given) serves, or is on its way."""
    gone = dead or {}
    states = {
        replica.state
        for replica in replicas
        if replica.spec.model == model
        and version in (None, replica.spec.version)
        and replica.incarnation > gone.get(replica.replica_id, -1)
    }
    if fleet.ReplicaState.SERVING in states:
        return Outlook.SERVING
    coming = {fleet.ReplicaState.STARTING, fleet.ReplicaState.WARM, fleet.ReplicaState.ASLEEP}
    return Outlook.COMING if states & coming else Outlook.NONE


DEFAULT = Policy()


def choose(ask: Ask, at: Situation, policy: Policy = DEFAULT) -> Choice | None:
    """Place a request, or return None where no replica can take it now."""
    batch = ask.tier is requests.Tier.BATCH
    group = at.fleet.group(ask.model, ask.version, ask.adapter, batch=batch)
    if group is None or not group.pool.order:
        return None
    field = _Field(ask, at, policy, group)
    if ask.left and (left := int(ask.left * group.fitting(ask.context_tokens, long=ask.long))):
        field.leave(left)
    if group.stale(at.now):
        member = field.next_after(at.after)
        return None if member is None else Choice(member.replica, STALE)
    for reason, scorer in SCORERS:
        for _, keys in scorer(field):
            member = field.least(keys)
            if member is not None:
                return field.choice(member, reason)
    member = field.least(group.keys(ask.kv_tokens, long=ask.long))
    return None if member is None else field.choice(member, "least work in flight")


class _Field:
    """A group as one request finds it: who has room, and where a replica counts as saturated.

    Keys are those of `groups.Pool`: sorted, they are members by their work.
    """

    __slots__ = ("_bound", "ask", "at", "group", "members", "policy", "wanted")

    def __init__(self, ask: Ask, at: Situation, policy: Policy, group: groups.Group) -> None:
        self.ask, self.at, self.policy, self.group = ask, at, policy, group
        self.members = group.pool.members
        self._bound: float | None = None
        self.wanted = room.Wanted(
            ask.tier is requests.Tier.BATCH,
            ask.seats,
            ask.kv_tokens,
            ask.context_tokens if ask.context_tokens > group.least_context else 0,
            at.now,
            group.longs if ask.long else None,
            at.full,
            at.dead,
        )

    def leave(self, left: int) -> None:
        """Pass over those that compute no prompt now if there are no more of them than ``left``.

        They are what others need: nobody waits for a step of theirs.
        """
        resting = self.group.resting()
        found, unseen = 0, len(resting)
        at_once = iter(resting)
        # A few at a time: usually the first ones have room, and the rest is not looked at.
        while found + unseen > left:
            some = [self.members[at] for at in itertools.islice(at_once, 2 * left)]
            unseen -= len(some)
            found += len(self.wanted.those(some))
            if found > left:
                return
        self.wanted.resting = False

    def unsaturated(self, keys: Sequence[int], cached: float = 0.0) -> Sequence[int]:
        """Return those of ``keys`` whose member the request would not bring beyond the bound.

        An idle one never is. ``cached`` is the part of the prompt that they hold.
        """
        if not keys:
            return keys
        own = self.ask.prompt_tokens * (1 - cached) + self.ask.output_tokens
        idle_below = 1 << groups.SHIFT
        if keys[-1] < idle_below:
            return keys
        most = self.policy.slack_tokens - own
        if keys[-1] >> groups.SHIFT > most:
            most = max(most, self.bound - own)
        below = max(idle_below, (math.floor(most) + 1) << groups.SHIFT)
        return keys if keys[-1] < below else keys[: bisect.bisect_left(keys, below)]

    def holding(self, mask: int, share: float) -> Sequence[int]:
        """Return the keys of those in a mask of holders that have room and are not saturated."""
        group, held, known = self.group, self.at.held, self.members
        if (many := mask.bit_count()) > _FEW_HOLDERS:
            order = group.order(long=self.ask.long)
            if order is not None:
                # Of a busy pool few are not saturated: sooner looked for in the mask than it is read out.
                free = self.unsaturated(order, share)
                if len(free) <= many:
                    return [
                        key for key in free if held.has(mask, known[key & groups.AT].replica_id)
                    ]
        named = group.long_named if self.ask.long else group.named
        found = [at for name in held.names(mask) if (at := named.get(name)) is not None]
        return self.unsaturated(group.of(found), share)

    @property
    def bound(self) -> float:
        """Tokens beyond which a member is saturated, as far as the mean of all decides."""
        if self._bound is None:
            total = self.group.total + self.ask.prompt_tokens + self.ask.output_tokens
            self._bound = self.policy.factor * total / len(self.group)
        return self._bound

    def least(self, keys: Sequence[int]) -> contenders.Member | None:
        """Return the member with the least work among ``keys`` that has room.

        Among equals a new prefix goes where its hash says, so that workers and hosts agree on it; a
        prompt without one is drawn.
        """
        has, known = self.wanted.has, self.members
        for tried, key in enumerate(keys):
            if tried == _ONE_BY_ONE:
                rest = self.wanted.those([known[key & groups.AT] for key in keys[tried:]])
                if not rest:
                    return None
                return self._even(keys, rest[0])
            if has(known[key & groups.AT]):
                return self._even(keys, known[key & groups.AT])
        return None

    def _even(self, keys: Sequence[int], first: contenders.Member) -> contenders.Member:
        """Return ``first``, the least of those with room, or one of its equals."""
        tokens = first.load.tokens
        low = bisect.bisect_left(keys, tokens << groups.SHIFT)
        high = bisect.bisect_left(keys, (tokens + 1) << groups.SHIFT)
        if high - low == 1:
            return first
        ties = [self.members[key & groups.AT] for key in keys[low:high]]
        chosen = self._drawn(ties)
        return chosen if self.wanted.has(chosen) else self._drawn(self.wanted.those(ties))

    def _drawn(self, ties: Sequence[contenders.Member]) -> contenders.Member:
        if self.at.key is None:
            return ties[int(self.at.draw * len(ties))]
        return contenders.highest(ties, self.at.key)

    def next_after(self, name: str) -> contenders.Member | None:
        """Return the first member with room whose id follows ``name``, from the first again at the end."""
        known, keys, group = self.members, self.group.pool.keys, self.group
        turn = [known[at] for at in group.after(name) if keys[at] >= 0]
        for member in turn[:_ONE_BY_ONE]:
            if self.wanted.has(member):
                return member
        return next(iter(self.wanted.those(turn[_ONE_BY_ONE:])), None)

    def choice(self, member: contenders.Member, reason: str) -> Choice:
        """Return the choice of ``member``."""
        return Choice(member.replica, reason, self.at.held.share(member.replica_id))


Scored = Iterator[tuple[float, Sequence[int]]]


def _holders(field: _Field) -> Scored:
    """Score by the cached part of the prompt, where that is worth something.

    A batch line that shares what a holder has adds nothing to it: lines that begin alike follow each other,
    and hold that beginning together. Statistics correct this where it was in nobody's use.
    """
    wanted = field.wanted
    whole = wanted.kv_tokens
    for share, mask in field.at.held.levels():
        if share < field.policy.least_share:
            break
        if keys := field.holding(mask, share):
            wanted.kv_tokens = field.ask.kv_beside(share)
            yield share, keys
    wanted.kv_tokens = whole


def _hinted(field: _Field) -> Scored:
    """Score by the claim on the caller's cache hint: the highest first, then that of those with room."""
    if field.ask.hint is None:
        return
    key, group = contenders.hash_of(field.ask.hint), field.group
    yield 1.0, field.unsaturated(group.of([group.highest(key)]))
    keys = field.unsaturated(group.keys(field.ask.kv_tokens, long=field.ask.long))
    fit = field.wanted.those([field.members[each & groups.AT] for each in keys])
    if fit:
        best = contenders.highest(fit, key)
        yield contenders.claim(best.seed, key) / 2**64, group.of([group.named[best.replica_id]])


def _adapted(field: _Field) -> Scored:
    """Score 1 for the replicas that an adapter is kept on: as many as its part of the traffic needs."""
    adapter, group = field.ask.adapter, field.group
    if adapter is None:
        return
    width = max(1, round(field.at.adapter_share * field.policy.factor * len(group)))
    if width < len(group):
        yield 1.0, field.unsaturated(group.of(group.ranked(adapter)[:width]))


Scorer = Callable[[_Field], Scored]
SCORERS: tuple[tuple[str, Scorer], ...] = (
    ("prefix is there", _holders),
    ("cache hint", _hinted),
    ("adapter is there", _adapted),
)
"""In the order of what they save: a prefill is dearer than the loading of an adapter. Each names, by falling
score in (0, 1], the replicas that it would have, without those that are saturated. The picker takes the one
with the least work of the first that have room; where none of them has, the next scorer is asked, and at last
the least work in flight decides."""
