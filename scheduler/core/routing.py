"""Which replica takes a request: filters say who may, scorers in [0, 1] who should, a picker who does.

Pure: the random numbers, the time, the load and who holds which prefix are arguments. Filters that
change only with a view are settled in `candidates`; those here look at what changes with each request.
"""

import bisect
import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from scheduler.contracts import fleet, ids, requests
from scheduler.core import candidates, prefixes
from scheduler.core.candidates import Member


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
        prefill_steps: see `candidates.Member.prefill_limit`.
    """

    factor: float = 1.25
    slack_tokens: int = 2048
    least_share: float = 0.1
    long_share: float = 0.25
    prefill_steps: float = candidates.PREFILL_STEPS


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What a request needs of a replica.

    Attributes:
        context_tokens: prompt plus output, as far as known; 0 if not known.
        seats: sequences that it runs at once.
        prompt_tokens: the prompt, estimated; 0 if not known.
        output_tokens: what its sequences will sample together, estimated; 0 if not known.
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
    long: bool = False
    left: float = 0.0
    prefix: prefixes.Prefix = prefixes.NONE
    hint: str | None = None

    @property
    def kv_tokens(self) -> int:
        """KV cache that it will come to hold, in tokens."""
        return (self.prompt_tokens + self.output_tokens) if self.prompt_tokens else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a request is to be placed.

    Attributes:
        fleet: the newest view, made ready.
        now: monotonic seconds.
        held: who is thought to hold how much of the prompt, as a share of it.
        key: the first fingerprint of the prompt that nobody holds, or None without fingerprints.
        adapter_share: part of the model's traffic that asks for this adapter.
        dead: per replica, the newest incarnation that is known to be gone.
        full: replicas that said "full" a moment ago, to this band's kind of request.
        draw: a random number in [0, 1) that breaks ties.
        turn: grows by one with each request, for round-robin without statistics.
    """

    fleet: candidates.Fleet
    now: float = 0.0
    held: Mapping[ids.ReplicaId, float] = dataclasses.field(default_factory=dict)
    key: int | None = None
    adapter_share: float = 0.0
    dead: Mapping[ids.ReplicaId, int] = dataclasses.field(default_factory=dict)
    full: AbstractSet[ids.ReplicaId] = frozenset()
    draw: float = 0.0
    turn: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The replica, why it was it, and the part of the prompt that it is thought to hold."""

    replica: fleet.Replica
    reason: str
    cached_share: float = 0.0


STALE = "round-robin: stale statistics"


class Outlook(enum.StrEnum):
    """Whether waiting for a model makes sense."""

    SERVING = "serving"
    COMING = "coming"
    NONE = "none"


def pick_version(route: fleet.Route, draw: float) -> str | None:
    """Return a version by the route's weights.

    Args:
        route: the weights; they need not add up to 100.
        draw: random number in [0, 1).
    """
    versions = [version for version in sorted(route.weights) if route.weights[version] > 0]
    if not versions:
        return None
    edges = list(itertools.accumulate(route.weights[version] for version in versions))
    return versions[min(bisect.bisect_right(edges, draw * edges[-1]), len(versions) - 1)]


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
    if group is None:
        return None
    if left := int(ask.left * _fitting(ask, group)):
        # Those that compute no prompt now are what others need: nobody waits for a step of theirs.
        able = _able(ask, group.members, group, at)
        free = {member.replica_id for member in able if not member.load.prefill}
        if len(free) <= left:
            at = dataclasses.replace(at, full=at.full | free)
    if group.stale(at.now):
        able = _able(ask, group.members, group, at)
        return Choice(able[at.turn % len(able)].replica, STALE) if able else None
    field = _Field(ask, at, policy, group)
    for reason, scorer in SCORERS:
        scores = scorer(field)
        if scores:
            return field.choice(_best(field, scores), reason)
    member = _least(field)
    return None if member is None else field.choice(member, "least work in flight")


def _fitting(ask: Ask, group: candidates.Group) -> int:
    """Return how many members could take the request if they were idle."""
    members = group.members
    if ask.long:
        members = [member for member in members if member.replica_id in group.longs]
    if ask.context_tokens > group.least_context:
        return sum(ask.context_tokens <= member.replica.spec.max_context for member in members)
    return len(members)


def _able(
    ask: Ask, members: Sequence[Member], group: candidates.Group, at: Situation
) -> list[Member]:
    """Return those of ``members`` that have room now, in their order."""
    seats, kv = ask.seats, ask.kv_tokens
    if ask.tier is requests.Tier.BATCH:
        able = [
            m
            for m in members
            if m.load.prefill < m.prefill_limit
            and batch_room(m, at.now) >= seats
            and _kv_batch(m, kv)
        ]
    else:
        # Batch does not count: the replica aborts it for us (rung 0). An idle replica takes anything:
        # what does not fit its KV cache at all is for the engine to refuse, in its own words.
        able = [
            m
            for m in members
            if (held := m.load).urgent + seats <= m.seats
            and held.prefill < m.prefill_limit
            and (held.urgent_kv + kv <= m.kv_limit or not held.urgent)
        ]
    if ask.context_tokens > group.least_context:
        able = [m for m in able if ask.context_tokens <= m.replica.spec.max_context]
    if at.full:
        able = [m for m in able if m.replica_id not in at.full]
    if at.dead:
        able = [m for m in able if m.replica.incarnation > at.dead.get(m.replica_id, -1)]
    if ask.long:
        able = [m for m in able if m.replica_id in group.longs]
    return able


def _kv_batch(member: Member, kv_tokens: int) -> bool:
    held = member.load
    ours = held.urgent_kv + held.batch_kv
    return ours + kv_tokens <= member.kv_limit or not (held.urgent or held.batch)


def batch_room(member: Member, now: float) -> int:
    """Return how many more seats batch may take on a replica.

    With fresh statistics our own count decides and the replica corrects it. With stale ones batch never
    adds more than the seats that are known to be free: what others held when they came counts as held
    still. A replica that was never heard of gets none.
    """
    replica, held = member.replica, member.load
    urgent, batch = held.urgent, held.batch
    if member.stale(now):
        if replica.stats is None:
            return 0
        urgent += max(0, replica.stats.interactive - member.heard_urgent)
        batch += max(0, replica.stats.batch - member.heard_batch)
    reserved = 0 if replica.role is fleet.Role.BATCH else replica.spec.reserved_seats
    return replica.spec.seats - reserved - urgent - batch


class _Field:
    """A group as one request finds it: the work in flight, and where a replica counts as saturated.

    Attributes:
        tokens: work of each member, in the group's order.
        bound: tokens beyond which a member is saturated.
    """

    __slots__ = ("ask", "at", "bound", "group", "policy", "tokens")

    def __init__(self, ask: Ask, at: Situation, policy: Policy, group: candidates.Group) -> None:
        self.ask, self.at, self.policy, self.group = ask, at, policy, group
        self.tokens = [held.tokens for held in group.loads]
        total = sum(self.tokens) + ask.prompt_tokens + ask.output_tokens
        self.bound = max(policy.slack_tokens, policy.factor * total / len(self.tokens))

    def able(self, members: Sequence[Member]) -> list[Member]:
        """Return those of ``members`` that have room."""
        return _able(self.ask, members, self.group, self.at)

    def saturated(self, member: Member) -> bool:
        """Whether the request would bring a member beyond the bound; never an idle one."""
        held = member.load.tokens
        cached = self.at.held.get(member.replica_id, 0.0)
        own = self.ask.prompt_tokens * (1 - cached) + self.ask.output_tokens
        return held > 0 and held + own > self.bound

    def fit(self, members: Sequence[Member]) -> list[Member]:
        """Return those of ``members`` that have room and are not saturated."""
        return [member for member in self.able(members) if not self.saturated(member)]

    def choice(self, member: Member, reason: str) -> Choice:
        """Return the choice of ``member``."""
        return Choice(member.replica, reason, self.at.held.get(member.replica_id, 0.0))


def _holders(field: _Field) -> dict[Member, float]:
    """Score by the cached part of the prompt, where that is worth something."""
    held, least = field.at.held, field.policy.least_share
    named = [name for name, share in held.items() if share >= least]
    if not named:
        return {}
    known = [member for name in named if (member := field.group.named.get(name)) is not None]
    return {member: held[member.replica_id] for member in field.fit(known)}


def _hinted(field: _Field) -> dict[Member, float]:
    """Score 1 for the replica with the highest claim on the caller's cache hint, of those with room."""
    if field.ask.hint is None:
        return {}
    key = candidates.hash_of(field.ask.hint)
    fit = field.fit([field.group.highest(key)])
    if not fit:
        fit = field.fit(field.group.members)
    return {max(fit, key=lambda member: member.claim(key)): 1.0} if fit else {}


def _adapted(field: _Field) -> dict[Member, float]:
    """Score 1 for the replicas that an adapter is kept on: as many as its part of the traffic needs."""
    adapter, members = field.ask.adapter, field.group.members
    if adapter is None:
        return {}
    width = max(1, round(field.at.adapter_share * field.policy.factor * len(members)))
    if width >= len(members):
        return {}
    return dict.fromkeys(field.fit(field.group.ranked(adapter)[:width]), 1.0)


Scorer = Callable[[_Field], Mapping[Member, float]]
SCORERS: tuple[tuple[str, Scorer], ...] = (
    ("prefix is there", _holders),
    ("cache hint", _hinted),
    ("adapter is there", _adapted),
)
"""In the order of what they save: a prefill is dearer than the loading of an adapter. Each scores, in
(0, 1], only replicas that it would have; the next is asked where it would have none, and where none of
them would, the least work in flight decides."""


def _best(field: _Field, scores: Mapping[Member, float]) -> Member:
    """Return the member with the best score, among equals the one with the least work."""
    best = max(scores.values())
    ties = [member for member, score in scores.items() if score == best]
    return _even(field, ties, [member.load.tokens for member in ties])


def _least(field: _Field) -> Member | None:
    """Return the member with the least work in flight of those that have room."""
    members = field.group.members
    found = field.able([_even(field, members, field.tokens)])
    if not found:
        found = field.able(members)
    return _even(field, found, [member.load.tokens for member in found]) if found else None


def _even(field: _Field, members: Sequence[Member], tokens: Sequence[int]) -> Member:
    """Return the member with the fewest tokens.

    Among equals a new prefix goes where its hash says, so that workers and hosts agree on it; a prompt
    without one is drawn.
    """
    least = min(tokens)
    if tokens.count(least) == 1:
        return members[tokens.index(least)]
    key = field.at.key
    if key is not None and len(members) == len(field.tokens) and max(tokens) == least:
        return field.group.highest(key)  # all are equal, as in an idle fleet
    ties = [member for member, has in zip(members, tokens, strict=True) if has == least]
    if key is None:
        return ties[int(field.at.draw * len(ties))]
    return max(ties, key=lambda member: member.claim(key))
