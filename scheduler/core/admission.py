"""Who waits, in which order, and who is refused: one bounded queue per model.

Order: band (the tier), inside a band teams by least attained service (`fairness`), inside a team earliest
deadline first. Lanes keep requests of different shapes out of each other's way (`bands`).

Standard can't starve: once its oldest has waited `Rules.age_s`, every `Rules.age_turns`-th turn is its own.
Batch does not age: it has hours, is shed first, and what is shed waits on in the batch runner, which loses
no line. Nothing here knows the time: ``now`` is monotonic seconds, given by the caller.
"""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from scheduler.contracts import requests
from scheduler.core import bands, drain, fairness, ordering

Placed = TypeVar("Placed")
Ticket = bands.Ticket
Bound = bands.Bound
Pass = bands.Pass
_AGEING = requests.Tier.STANDARD


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What a queue goes by.

    Attributes:
        bounds: how much may wait in each band.
        total: how much may wait in all; past it the lowest band is shed first.
        half_life_s: see `fairness.Service`.
        age_s: wait after which standard has turns of its own.
        age_turns: every how many turns one is standard's, once it has aged; at least 2.
        shares: each team's part, 1 where not named.
        credit: see `fairness.Service`.
    """

    bounds: Mapping[requests.Tier, Bound]
    total: Bound
    half_life_s: float = 300.0
    age_s: float = 30.0
    age_turns: int = 8
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    credit: float = 0.0


class Reason(enum.StrEnum):
    """Why a request was refused before it waited."""

    QUEUE_FULL = "queue_full"
    EXPIRED = "expired"  # the deadline had passed already
    UNMEETABLE = "unmeetable"  # the deadline will have passed before its turn


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """The ticket waits now; `shed` are those that had to make room for it."""

    ticket: Ticket
    shed: tuple[Ticket, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The ticket does not wait; `retry_after_s` says when a place is likely."""

    reason: Reason
    retry_after_s: float


class Queue:
    """The requests of one model that wait for a replica."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._next_place = 0
        self._waiting: dict[str, Ticket] = {}
        self._size = 0
        self._bands = {
            tier: bands.Band(
                rules.bounds[tier],
                fairness.Service(rules.half_life_s, rules.shares, rules.credit),
            )
            for tier in requests.Tier
        }
        self._deadlines: ordering.Order[Ticket] = ordering.Order()
        self._turns = 0  # of the highest band since the last that was standard's own

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._size

    def waiting(self) -> dict[str, int]:
        """Return how many wait, by tier, zeros included."""
        return {tier.value: len(band) for tier, band in self._bands.items()}

    def oldest(self, tier: requests.Tier) -> Ticket | None:
        """Return who has waited longest in a band."""
        return self._bands[tier].oldest()

    def attained(self, tier: requests.Tier, team: str, now: float) -> float:
        """Return the weighted tokens that a team has had in a band, decayed to ``now``."""
        return self._bands[tier].service.attained(team, now)

    def shapes(self) -> set[Hashable]:
        """Return what those who wait need."""
        return {shape for band in self._bands.values() for shape in band.shapes()}

    def offer(self, ticket: Ticket, *, now: float, drain_per_s: float | None) -> Admitted | Refused:
        """Let a request wait, or refuse it with the reason.

        Args:
            ticket: the request; the queue's from now on.
            now: monotonic seconds.
            drain_per_s: departures per second measured on this ticket's band while somebody waited, or
                None where that is not known.
        """
        if ticket.deadline is not None and ticket.deadline <= now:
            return Refused(Reason.EXPIRED, drain.MIN_RETRY_S)
        if drain_per_s and ticket.deadline is not None:
            late_s = now + self._ahead(ticket) / drain_per_s - ticket.deadline
            if late_s > 0:
                return Refused(Reason.UNMEETABLE, drain.clamp(late_s))
        shed = self._room_for(ticket)
        if shed is None:
            return Refused(Reason.QUEUE_FULL, drain.retry_after_s(1, drain_per_s))
        for victim in shed:
            self.remove(victim.request_id)
        ticket.place = self._next_place
        self._next_place += 1
        self._insert(ticket, now)
        return Admitted(ticket, tuple(shed))

    def pass_by(self, ticket: Ticket, now: float) -> None:
        """Let a ticket go without having waited: its team is charged, and it may be requeued."""
        ticket.place = self._next_place
        self._next_place += 1
        self._bands[ticket.tier].charge(ticket.team, ticket.cost, now, served=True)

    def settle(self, ticket: Ticket, cost: float, now: float) -> None:
        """Replace what was charged when the ticket went by what it has cost."""
        if cost != ticket.cost:
            self._bands[ticket.tier].charge(ticket.team, cost - ticket.cost, now)
            ticket.cost = cost

    def requeue(self, ticket: Ticket, now: float) -> None:
        """Let a ticket that was taken wait again at its old place; bounds do not apply, and it is not shed.

        Raises:
            ValueError: it waits already, or was never admitted.
        """
        if ticket.place < 0 or ticket.request_id in self._waiting:
            raise ValueError(f"ticket {ticket.request_id} was not taken from this queue")
        self._bands[ticket.tier].charge(ticket.team, -ticket.cost, now)
        ticket.again = True
        self._insert(ticket, now)

    def take(
        self,
        place: Callable[[Ticket], Placed | Pass | None],
        now: float,
        closed: frozenset[requests.Tier] = frozenset(),
    ) -> tuple[Ticket, Placed] | None:
        """Take the first ticket for which ``place`` finds something.

        Args:
            place: see `bands.Band.take`.
            now: monotonic seconds.
            closed: bands that need not be asked: nothing has room for them.

        Returns:
            The ticket, which no longer waits, and what ``place`` returned; None if nobody can go.
        """
        if not self._waiting:
            return None
        for tier in self._turn_order(now):
            band = self._bands[tier]
            if tier in closed or not len(band):
                continue
            found = band.take(place, now)
            if found is not None:
                self._forget(found[0])
                self._turns = 0 if tier is _AGEING else self._turns + 1
                return found
        return None

    def head(self, tier: requests.Tier, shape: Hashable) -> Ticket | None:
        """Return who goes first of those of a band that need ``shape``."""
        return self._bands[tier].head(shape)

    def pull(self, ticket: Ticket, now: float) -> None:
        """Take a ticket that waits out of its turn: a replica was kept for it. Its team is charged."""
        self._bands[ticket.tier].remove(ticket)
        self._forget(ticket)
        self._bands[ticket.tier].charge(ticket.team, ticket.cost, now, served=True)
        self._turns = 0 if ticket.tier is _AGEING else self._turns + 1

    def remove(self, request_id: str) -> Ticket | None:
        """Forget a ticket that waits (its caller left); None if it does not wait."""
        ticket = self._waiting.get(request_id)
        if ticket is None:
            return None
        self._bands[ticket.tier].remove(ticket)
        self._forget(ticket)
        return ticket

    def expire(self, now: float) -> tuple[Ticket, ...]:
        """Remove and return the tickets whose deadline has passed."""
        gone: list[Ticket] = []
        while (first := self._deadlines.first()) is not None and first[0][0] <= now:
            self.remove(first[1].request_id)
            gone.append(first[1])
        return tuple(gone)

    def drop(self, shape: Hashable, only: requests.Tier | None = None) -> tuple[Ticket, ...]:
        """Remove and return everybody, or of one tier ``only``, who needs ``shape``: nothing will take it."""
        among = self._bands.values() if only is None else (self._bands[only],)
        gone = tuple(ticket for band in among for ticket in band.of_shape(shape))
        for ticket in gone:
            self.remove(ticket.request_id)
        return gone

    def reshape(self, shape: Callable[[Ticket], Hashable], now: float) -> None:
        """Ask ``shape`` anew for everybody who waits (the route's weights have changed)."""
        for band in self._bands.values():
            for ticket in list(band):
                wanted = shape(ticket)
                if wanted != ticket.shape:
                    band.reshape(ticket, wanted, now)

    def aged(self, now: float) -> bool:
        """Return whether the next turn belongs to tier standard, which has waited too long."""
        oldest = self._bands[_AGEING].oldest()
        return (
            oldest is not None
            and now - oldest.arrived >= self._rules.age_s
            and self._turns + 1 >= self._rules.age_turns
        )

    def _turn_order(self, now: float) -> tuple[requests.Tier, ...]:
        if self.aged(now):
            return (_AGEING, *(tier for tier in requests.Tier if tier is not _AGEING))
        return tuple(requests.Tier)

    def _ahead(self, ticket: Ticket) -> int:
        """Return how many of the band go until it was this ticket's turn, itself included.

        Teams take turns, so it waits for its own team's and for as many of each other team. (Turns are
        of equal service, not of equal number: right where teams ask for requests of like size.)
        """
        band = self._bands[ticket.tier]
        own = band.waiting(ticket.team) + 1
        others = band.teams - (1 if own > 1 else 0)
        return min(len(band) + 1, own * (others + 1))

    def _room_for(self, ticket: Ticket) -> list[Ticket] | None:
        """Return who must go so that the bounds hold, or None if the ticket itself may not wait."""
        shed: list[Ticket] = []
        band = self._bands[ticket.tier]
        if ticket.size > min(band.bound.size, self._rules.total.size):
            return None
        if band.full(ticket.size):
            found = band.victim()
            # Who takes the place of another's must hold less with it than the other holds now.
            if found is None or found[0] <= band.part(ticket.team, ticket.size):
                return None
            shed.append(found[1])
            if band.size - found[1].size + ticket.size > band.bound.size:
                return None  # one for one: a large body does not push out several small ones
        count, size = len(self._waiting) + 1 - len(shed), self._size + ticket.size
        size -= sum(victim.size for victim in shed)
        total = self._rules.total
        if count <= total.requests and size <= total.size:
            return shed
        for tier in reversed(requests.Tier):
            lower = self._bands[tier]
            if tier.band <= ticket.tier.band:
                break
            found = lower.victim()
            if found is None:
                continue
            if count - 1 <= total.requests and size - found[1].size <= total.size:
                return [*shed, found[1]]
        return None

    def _insert(self, ticket: Ticket, now: float) -> None:
        self._waiting[ticket.request_id] = ticket
        self._size += ticket.size
        self._bands[ticket.tier].add(ticket, now)
        if ticket.deadline is not None:
            self._deadlines.put(ticket.request_id, (ticket.deadline, ticket.place), ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self._waiting[ticket.request_id]
        self._size -= ticket.size
        self._deadlines.discard(ticket.request_id)
