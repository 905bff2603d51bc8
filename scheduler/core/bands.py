"""One band of a model's queue: teams by least attained service, a team's tickets by deadline.

Tickets that need different things of a replica (their shape) stand in different lanes, so that one that
can't be placed now holds up nobody but its equals. Every operation is O(log n); finding somebody to go
asks once for each lane that has no room.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from scheduler.contracts import requests
from scheduler.core import fairness, ordering

Placed = TypeVar("Placed")
_NEVER = float("inf")


class Pass(enum.Enum):
    """Why a ticket is passed over while those behind it are asked."""

    TEAM = enum.auto()  # its team has to leave room; the next team's may go


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. Only the queue changes it.

    Attributes:
        request_id: whose it is.
        tier: decides the band.
        team: who pays.
        arrived: monotonic seconds of its arrival.
        deadline: monotonic seconds after which waiting is of no use, or None.
        shape: what it needs of a replica; requests of one shape can take each other's place.
        size: bytes of its body, which wait with it.
        cost: weighted tokens that it is thought to take; charged to its team when it goes.
        place: position given by `Queue.offer`; kept through every requeue.
        again: it has had its turn and waits again, before all others of its team.
    """

    request_id: str
    tier: requests.Tier
    team: str
    arrived: float
    deadline: float | None = None
    shape: Hashable = None
    size: int = 0
    cost: float = 1.0
    place: int = -1
    again: bool = False

    @property
    def urgency(self) -> tuple[float, int]:
        """Return its place among its team's: earliest deadline first, then first come."""
        return (_NEVER if self.deadline is None else self.deadline, self.place)


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """How much may wait."""

    requests: int
    size: int  # bytes

    def part(self, count: int, size: int) -> float:
        """Return which part of it is taken, by whichever measure is scarcer."""
        return max(count / max(1, self.requests), size / max(1, self.size))


class _Lane:
    """The tickets of one shape: teams in the band's order, each with its tickets by deadline."""

    __slots__ = ("order", "shape", "teams")

    def __init__(self, shape: Hashable) -> None:
        self.shape = shape
        self.teams: dict[str, ordering.Order[Ticket]] = {}
        self.order: ordering.Order[str] = ordering.Order()

    def head(self) -> tuple[ordering.Key, Ticket] | None:
        """Return who goes first, and the key by which lanes compare."""
        first = self.order.first()
        if first is None:
            return None
        key, team = first
        found = self.teams[team].first()
        return None if found is None else ((*key, *found[0]), found[1])


class _Team:
    """What one team has waiting."""

    __slots__ = ("lanes", "size", "tickets")

    def __init__(self) -> None:
        self.tickets: collections.OrderedDict[str, Ticket] = collections.OrderedDict()
        self.lanes: dict[str, _Lane] = {}
        self.size = 0


class Band:
    """The requests of one tier that wait for one model.

    Args:
        bound: how much may wait.
        service: what the teams have had.
    """

    def __init__(self, bound: Bound, service: fairness.Service) -> None:
        self.bound = bound
        self.service = service
        self.size = 0
        self._arrivals: collections.OrderedDict[str, Ticket] = collections.OrderedDict()
        self._teams: dict[str, _Team] = {}
        self._longest: ordering.Order[str] = ordering.Order()  # teams, the most waiting first
        self._served: ordering.Order[str] = ordering.Order()  # teams, the least served first
        self._lanes: dict[str, _Lane] = {}
        self._order: ordering.Order[_Lane] = ordering.Order()
        self._names: dict[Hashable, str] = {}
        self._named = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._arrivals.values())

    def oldest(self) -> Ticket | None:
        """Return who has waited longest."""
        return next(iter(self._arrivals.values()), None)

    def shapes(self) -> list[Hashable]:
        """Return what those who wait need."""
        return [lane.shape for lane in self._lanes.values()]

    def of_shape(self, shape: Hashable) -> list[Ticket]:
        """Return everybody who needs ``shape``."""
        lane = self._lanes.get(self._names.get(shape, ""))
        return [ticket for team in lane.teams.values() for ticket in team] if lane else []

    def head(self, shape: Hashable) -> Ticket | None:
        """Return who goes first of those who need ``shape``."""
        lane = self._lanes.get(self._names.get(shape, ""))
        found = lane.head() if lane else None
        return None if found is None else found[1]

    def waiting(self, team: str) -> int:
        """Return how many of a team's wait."""
        found = self._teams.get(team)
        return len(found.tickets) if found else 0

    @property
    def teams(self) -> int:
        """How many teams have something waiting."""
        return len(self._teams)

    def full(self, size: int) -> bool:
        """Whether a ticket of ``size`` bytes is too much."""
        return len(self) + 1 > self.bound.requests or self.size + size > self.bound.size

    def part(self, team: str, size: int = 0) -> float:
        """Return which part of the bound a team would hold with one more of ``size`` bytes."""
        found = self._teams.get(team)
        count, held = (len(found.tickets), found.size) if found else (0, 0)
        return self.bound.part(count + 1, held + size)

    def victim(self) -> tuple[float, Ticket] | None:
        """Return the newest ticket of the team with the most waiting, and the part which that holds.

        The longest queue gives way (McKenney, Stochastic Fairness Queueing, 1990), measured by its
        dominant part (Ghodsi et al., Dominant Resource Fairness, NSDI 2011): so whoever floods a band
        loses its own tickets and nobody else's. Who waits again does not: its client may have half an answer.
        """
        first = self._longest.first()
        if first is None:
            return None
        key, team = first
        return -key[0], next(reversed(self._teams[team].tickets.values()))

    def add(self, ticket: Ticket, now: float) -> None:
        """Let a ticket wait; one that waits again goes before all others of its team."""
        self._rebase(now)
        team = self._teams.get(ticket.team)
        if team is None:
            least = self._served.first()
            self.service.lift(ticket.team, None if least is None else least[1], now)
            team = self._teams[ticket.team] = _Team()
            self._served.put(ticket.team, self.service.key(ticket.team), ticket.team)
        for line in (self._arrivals, team.tickets):
            line[ticket.request_id] = ticket
            if ticket.again:
                line.move_to_end(ticket.request_id, last=False)
        self.size += ticket.size
        team.size += ticket.size
        self._measure(ticket.team, team)
        self._enter(ticket, team)

    def remove(self, ticket: Ticket) -> None:
        """Forget a ticket that waits."""
        team = self._teams[ticket.team]
        del self._arrivals[ticket.request_id]
        del team.tickets[ticket.request_id]
        self.size -= ticket.size
        team.size -= ticket.size
        self._leave(ticket, team)
        if team.tickets:
            self._measure(ticket.team, team)
            return
        del self._teams[ticket.team]
        self._longest.discard(ticket.team)
        self._served.discard(ticket.team)

    def reshape(self, ticket: Ticket, shape: Hashable, now: float) -> None:
        """Let a ticket need ``shape`` from now on; its place among those that came is kept."""
        self._rebase(now)
        team = self._teams[ticket.team]
        self._leave(ticket, team)
        ticket.shape = shape
        self._enter(ticket, team)

    def _enter(self, ticket: Ticket, team: _Team) -> None:
        """Put a ticket into the lane of its shape."""
        lane = self._lane(ticket.shape)
        name = self._names[ticket.shape]
        team.lanes[name] = lane
        line = lane.teams.get(ticket.team)
        if line is None:
            line = lane.teams[ticket.team] = ordering.Order()
            lane.order.put(ticket.team, self.service.key(ticket.team), ticket.team)
        line.put(ticket.request_id, ticket.urgency, ticket)
        self._place_lane(name, lane)

    def _leave(self, ticket: Ticket, team: _Team) -> None:
        """Take a ticket out of its lane."""
        name = self._names[ticket.shape]
        lane = self._lanes[name]
        line = lane.teams[ticket.team]
        line.discard(ticket.request_id)
        if not len(line):
            del lane.teams[ticket.team]
            lane.order.discard(ticket.team)
            del team.lanes[name]
        self._place_lane(name, lane)

    def take(
        self, place: Callable[[Ticket], Placed | Pass | None], now: float
    ) -> tuple[Ticket, Placed] | None:
        """Take the first ticket for which ``place`` finds something, and charge its team.

        Args:
            place: returns where the ticket goes, or None if nothing takes its shape now. It is asked
                once a lane: what has no room for the head has none for those behind it. With
                `Pass.TEAM` it holds up its own team only, which has to leave room to others.
            now: monotonic seconds.
        """
        passed: dict[str, _Lane] = {}
        held_back: list[tuple[_Lane, ordering.Key, str]] = []
        taken: tuple[Ticket, Placed] | None = None
        while (first := self._order.first()) is not None:
            lane = first[1]
            found = lane.head()
            assert found is not None  # noqa: S101 - a lane without tickets is dropped at once
            ticket = found[1]
            placed = place(ticket)
            if placed is not None and not isinstance(placed, Pass):
                taken = ticket, placed
                break
            name = self._names[lane.shape]
            passed[name] = lane
            if placed is not None:
                held_back.append((lane, self.service.key(ticket.team), ticket.team))
                lane.order.discard(ticket.team)
            following = lane.head() if placed is not None else None
            if following is None:
                self._order.discard(name)
            else:
                self._order.put(name, following[0], lane)
        for lane, key, team in held_back:
            lane.order.put(team, key, team)
        for name, lane in passed.items():
            self._place_lane(name, lane)
        if taken is not None:
            self.remove(taken[0])
            self.charge(taken[0].team, taken[0].cost, now, served=True)
        return taken

    def charge(self, team: str, tokens: float, now: float, *, served: bool = False) -> None:
        """Add to (or give back) what a team has had, and move what it has waiting."""
        self._rebase(now)
        self.service.charge(team, tokens, now, served=served)
        self._move(team)

    def _rebase(self, now: float) -> None:
        if self.service.due(now):
            self.service.rebase(now)
            for name in list(self._teams):
                self._move(name)

    def _move(self, name: str) -> None:
        team = self._teams.get(name)
        if team is None:
            return
        key = self.service.key(name)
        self._served.put(name, key, name)
        for lane_name, lane in team.lanes.items():
            lane.order.put(name, key, name)
            self._place_lane(lane_name, lane)

    def _measure(self, name: str, team: _Team) -> None:
        """Order a team among those that make room; one of which all wait again makes none.

        Batch does: nobody has heard anything of a line that waits, and its runner sends it again.
        """
        newest = next(reversed(team.tickets.values()))
        if newest.again and newest.tier is not requests.Tier.BATCH:
            self._longest.discard(name)
        else:
            self._longest.put(name, (-self.bound.part(len(team.tickets), team.size),), name)

    def _lane(self, shape: Hashable) -> _Lane:
        name = self._names.get(shape)
        if name is None:
            self._named += 1
            name = self._names[shape] = str(self._named)
            self._lanes[name] = _Lane(shape)
        return self._lanes[name]

    def _place_lane(self, name: str, lane: _Lane) -> None:
        head = lane.head()
        if head is not None:
            self._order.put(name, head[0], lane)
            return
        self._order.discard(name)
        del self._lanes[name]
        del self._names[lane.shape]
