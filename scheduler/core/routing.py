"""Which replica takes a request: filters say who may, scorers in [0, 1] who should, a picker who does.

Pure: the random numbers, the round-robin turn, the load and the age of the statistics are arguments.
"""

import bisect
import dataclasses
import enum
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from scheduler.contracts import fleet, ids, requests
from scheduler.core import load

STALE_AFTER_S = 1.0  # statistics come each 200 ms; five in a row missing is an outage
STICKY_FACTOR = 1.25  # bounded load: a replica keeps its prefixes up to 25 % above the mean
# (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads)


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What a request needs of a replica.

    Attributes:
        context_tokens: prompt plus output, as far as known; 0 if not known.
        seats: sequences that it runs at once.
        home: the replica that is thought to hold its prefix, if one is.
        hint: the caller's key for requests that share a prefix, or None.
    """

    model: str
    version: str
    tier: requests.Tier
    adapter: str | None = None
    context_tokens: int = 0
    seats: int = 1
    home: ids.ReplicaId | None = None
    hint: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A replica's newest statistics, seen from here.

    Attributes:
        age_s: seconds since they last changed.
        urgent: seats that our interactive and standard requests held there at that time.
        batch: seats that our batch requests held there at that time.
    """

    age_s: float
    urgent: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a request is to be placed.

    Attributes:
        replicas: every replica of the newest view.
        loads: what this gateway has in flight.
        heard: per replica, when its statistics last changed; missing means never.
        dead: per replica, the newest incarnation that is known to be gone.
        full: replicas that said "full" a moment ago, to this band's kind of request.
        draw: a random number in [0, 1) that breaks ties.
        turn: grows by one with each request, for round-robin without statistics.
    """

    replicas: Sequence[fleet.Replica]
    loads: load.Loads
    heard: Mapping[ids.ReplicaId, "Heard"]
    dead: Mapping[ids.ReplicaId, int] = dataclasses.field(default_factory=dict)
    full: frozenset[ids.ReplicaId] = frozenset()
    draw: float = 0.0
    turn: int = 0

    def stale(self, replica: fleet.Replica) -> bool:
        """Whether nothing new was heard of ``replica`` for more than a second."""
        heard = self.heard.get(replica.replica_id)
        return heard is None or heard.age_s > STALE_AFTER_S


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The replica, and why it was it."""

    replica: fleet.Replica
    reason: str


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
    states = {
        replica.state
        for replica in replicas
        if replica.spec.model == model
        and version in (None, replica.spec.version)
        and _alive(replica, dead or {})
    }
    if fleet.ReplicaState.SERVING in states:
        return Outlook.SERVING
    coming = {fleet.ReplicaState.STARTING, fleet.ReplicaState.WARM, fleet.ReplicaState.ASLEEP}
    return Outlook.COMING if states & coming else Outlook.NONE


def choose(ask: Ask, situation: Situation) -> Choice | None:
    """Place a request, or return None where no replica can take it now."""
    eligible = [
        replica
        for replica in situation.replicas
        if all(passes(ask, replica, situation) for passes in FILTERS)
    ]
    if not eligible:
        return None
    if all(situation.stale(replica) for replica in eligible):
        eligible.sort(key=lambda replica: replica.replica_id)
        return Choice(eligible[situation.turn % len(eligible)], "round-robin: stale statistics")
    sticky = _sticky(ask, eligible, situation)
    if sticky is not None:
        return sticky
    scores = [
        sum(weight * scorer(replica, situation) for scorer, weight in SCORERS)
        for replica in eligible
    ]
    best = max(scores)
    ties = [replica for replica, score in zip(eligible, scores, strict=True) if best - score < 1e-9]
    return Choice(ties[int(situation.draw * len(ties))], "least in flight")


def _sticky(ask: Ask, eligible: Sequence[fleet.Replica], situation: Situation) -> Choice | None:
    """Return the replica that holds the request's prefix, unless its load is beyond the bound."""
    totals = {r.replica_id: situation.loads.total(r.replica_id) for r in eligible}
    bound = math.ceil(STICKY_FACTOR * (sum(totals.values()) + 1) / len(eligible))
    below = [replica for replica in eligible if totals[replica.replica_id] < bound]
    if ask.home is not None:
        for replica in below:
            if replica.replica_id == ask.home:
                return Choice(replica, "prefix is there")
    if ask.hint is None:
        return None
    hint = ask.hint
    return Choice(max(below, key=lambda r: _rendezvous(hint, r.replica_id)), "cache hint")


def _rendezvous(key: str, replica_id: ids.ReplicaId) -> bytes:
    """Return the replica's claim on a key; the highest claim wins and few keys move with a replica."""
    text = f"{key}\0{replica_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


def _alive(replica: fleet.Replica, dead: Mapping[ids.ReplicaId, int]) -> bool:
    return replica.incarnation > dead.get(replica.replica_id, -1)


def _serves(ask: Ask, replica: fleet.Replica, situation: Situation) -> bool:
    return (
        replica.state is fleet.ReplicaState.SERVING
        and replica.address != ""
        and _alive(replica, situation.dead)
    )


def _right_model(ask: Ask, replica: fleet.Replica, situation: Situation) -> bool:
    spec = replica.spec
    return (
        spec.model == ask.model
        and spec.version == ask.version
        and (ask.adapter is None or ask.adapter in spec.adapters)
    )


def _context_fits(ask: Ask, replica: fleet.Replica, situation: Situation) -> bool:
    return ask.context_tokens <= replica.spec.max_context


def _role_allows(ask: Ask, replica: fleet.Replica, situation: Situation) -> bool:
    if ask.tier is requests.Tier.BATCH:
        return replica.role is not fleet.Role.INTERACTIVE
    return replica.role is not fleet.Role.BATCH


def _has_room(ask: Ask, replica: fleet.Replica, situation: Situation) -> bool:
    """Cap what is in flight: the replica's own "full" is the last word, this saves the asking."""
    if replica.replica_id in situation.full:
        return False
    if ask.tier is not requests.Tier.BATCH:
        # Batch does not count: the replica aborts it for us (rung 0).
        return situation.loads.urgent(replica.replica_id) + ask.seats <= replica.spec.seats
    return batch_room(replica, situation) >= ask.seats


def batch_room(replica: fleet.Replica, situation: Situation) -> int:
    """Return how many more seats batch may take on a replica.

    With fresh statistics our own count decides and the replica corrects it. With stale ones batch never
    adds more than the seats that are known to be free: what others held when they came counts as held
    still. A replica that was never heard of gets none.
    """
    urgent = situation.loads.urgent(replica.replica_id)
    batch = situation.loads.batch(replica.replica_id)
    if situation.stale(replica):
        heard = situation.heard.get(replica.replica_id)
        if replica.stats is None or heard is None:
            return 0
        urgent += max(0, replica.stats.interactive - heard.urgent)
        batch += max(0, replica.stats.batch - heard.batch)
    reserved = 0 if replica.role is fleet.Role.BATCH else replica.spec.reserved_seats
    return replica.spec.seats - reserved - urgent - batch


FILTERS: tuple[Callable[[Ask, fleet.Replica, Situation], bool], ...] = (
    _right_model,
    _serves,
    _role_allows,
    _context_fits,
    _has_room,
)


def _idle(replica: fleet.Replica, situation: Situation) -> float:
    """Score 1 for an empty replica, 0 for one with every seat taken by us."""
    seats = max(1, replica.spec.seats)
    return max(0.0, 1 - situation.loads.total(replica.replica_id) / seats)


SCORERS: tuple[tuple[Callable[[fleet.Replica, Situation], float], float], ...] = ((_idle, 1.0),)


class Freshness:
    """When each replica's statistics last changed, by the receiver's own monotonic clock.

    The time stamp in them is another machine's, so only its change is looked at: a view that keeps
    coming with frozen statistics is as stale as one that no longer comes.
    """

    def __init__(self) -> None:
        self._seen: dict[ids.ReplicaId, tuple[int, float, int, int]] = {}

    def observe(self, replicas: Sequence[fleet.Replica], loads: load.Loads, now: float) -> None:
        """Take in a view that came at ``now``, while we had ``loads`` in flight."""
        fresh: dict[ids.ReplicaId, tuple[int, float, int, int]] = {}
        for replica in replicas:
            if replica.stats is None:
                continue
            name, stamp = replica.replica_id, replica.stats.at_us
            before = self._seen.get(name)
            if before is None or before[0] != stamp:
                before = (stamp, now, loads.urgent(name), loads.batch(name))
            fresh[name] = before
        self._seen = fresh

    def heard(self, now: float) -> dict[ids.ReplicaId, Heard]:
        """Return what was heard of each replica, as of ``now``."""
        return {
            name: Heard(now - at, urgent, batch)
            for name, (_, at, urgent, batch) in self._seen.items()
        }
