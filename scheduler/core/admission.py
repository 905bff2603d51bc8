"""Who waits, in which order, and who is refused: one bounded queue per model.

Order: band (the tier), then first come, first served. Inside a band requests that need different
things (another version, another context) stand in different lanes, so that one that can't be placed
now holds up nobody but its equals. Fairness among teams has its place between band and lane.
Nothing here knows the time: ``now`` is monotonic seconds, given by the caller.
"""

import bisect
import collections
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from scheduler.contracts import requests

Placed = TypeVar("Placed")

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """One waiting request.

    Attributes:
        request_id: whose it is.
        tier: decides the band.
        team: who pays.
        arrived: monotonic seconds of its arrival.
        deadline: monotonic seconds after which waiting is of no use, or None.
        shape: what it needs of a replica; requests of one shape can take each other's place.
        place: position given by `Queue.offer`; kept through every requeue.
    """

    request_id: str
    tier: requests.Tier
    team: str
    arrived: float
    deadline: float | None = None
    shape: Hashable = None
    place: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """How many may wait: in each band, and in the whole queue."""

    per_tier: Mapping[requests.Tier, int]
    total: int


class Reason(enum.StrEnum):
    """Why a request was refused before it waited."""

    QUEUE_FULL = "queue_full"
    EXPIRED = "expired"  # the deadline had passed already
    UNMEETABLE = "unmeetable"  # the deadline will have passed before its turn


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """The ticket waits now; `shed` are the batch tickets that made room for it."""

    ticket: Ticket
    shed: tuple[Ticket, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The ticket does not wait; `retry_after_s` says when a place is likely."""

    reason: Reason
    retry_after_s: float


class _Line:
    """Tickets sorted by a key. A search is O(log n); the shift after it is one memmove."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._tickets: dict[tuple[float, int], Ticket] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: tuple[float, int], ticket: Ticket) -> None:
        bisect.insort(self._keys, key)
        self._tickets[key] = ticket

    def remove(self, key: tuple[float, int]) -> None:
        del self._tickets[key]
        del self._keys[bisect.bisect_left(self._keys, key)]

    def first(self) -> Ticket | None:
        return self._tickets[self._keys[0]] if self._keys else None

    def last(self) -> Ticket | None:
        return self._tickets[self._keys[-1]] if self._keys else None

    def __iter__(self) -> Iterator[Ticket]:
        return (self._tickets[key] for key in self._keys)


class Queue:
    """The requests of one model that wait for a replica."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._next_place = 0
        self._waiting: dict[str, Ticket] = {}
        self._bands: dict[requests.Tier, _Line] = {tier: _Line() for tier in requests.Tier}
        self._lanes: dict[tuple[requests.Tier, Hashable], _Line] = {}
        self._deadlines = _Line()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def waiting(self) -> dict[str, int]:
        """Return how many wait, by tier, zeros included."""
        return {tier.value: len(self._bands[tier]) for tier in requests.Tier}

    def oldest(self, tier: requests.Tier) -> Ticket | None:
        """Return the head of a band."""
        return self._bands[tier].first()

    def tickets(self) -> tuple[Ticket, ...]:
        """Return everybody who waits, in order."""
        return tuple(ticket for tier in requests.Tier for ticket in self._bands[tier])

    def offer(self, ticket: Ticket, *, now: float, drain_per_s: float | None) -> Admitted | Refused:
        """Let a request wait, or refuse it with the reason.

        Args:
            ticket: the request; its `place` is ignored.
            now: monotonic seconds.
            drain_per_s: departures per second measured on this ticket's band while somebody
                waited, or None where that is not known.
        """
        if ticket.deadline is not None and ticket.deadline <= now:
            return Refused(Reason.EXPIRED, MIN_RETRY_S)
        ahead = sum(
            len(line) for tier, line in self._bands.items() if tier.band <= ticket.tier.band
        )
        if drain_per_s and ticket.deadline is not None:
            late_s = now + (ahead + 1) / drain_per_s - ticket.deadline
            if late_s > 0:
                return Refused(Reason.UNMEETABLE, _clamp(late_s))
        if len(self._bands[ticket.tier]) >= self._bounds.per_tier[ticket.tier]:
            return Refused(Reason.QUEUE_FULL, retry_after_s(1, drain_per_s))
        shed: tuple[Ticket, ...] = ()
        if len(self._waiting) >= self._bounds.total:
            victim = self._bands[requests.Tier.BATCH].last()
            if victim is None or ticket.tier is requests.Tier.BATCH:
                return Refused(Reason.QUEUE_FULL, retry_after_s(1, drain_per_s))
            self.remove(victim.request_id)
            shed = (victim,)
        admitted = dataclasses.replace(ticket, place=self._next_place)
        self._next_place += 1
        self._insert(admitted)
        return Admitted(admitted, shed)

    def requeue(self, ticket: Ticket) -> None:
        """Let a ticket that was taken wait again at its old place; bounds do not apply.

        Raises:
            ValueError: it waits already, or was never admitted.
        """
        if ticket.place < 0 or ticket.request_id in self._waiting:
            raise ValueError(f"ticket {ticket.request_id} was not taken from this queue")
        self._insert(ticket)

    def take(self, place: Callable[[Ticket], Placed | None]) -> tuple[Ticket, Placed] | None:
        """Take the first ticket for which ``place`` finds something.

        Args:
            place: returns where the ticket goes, or None if nothing takes its shape now. It is
                asked once a lane: what has no room for the head has none for those behind it.

        Returns:
            The ticket, which no longer waits, and what ``place`` returned; None if nobody can go.
        """
        for tier in requests.Tier:
            heads = [line.first() for (band, _), line in list(self._lanes.items()) if band is tier]
            for head in sorted((head for head in heads if head), key=lambda head: head.place):
                found = place(head)
                if found is not None:
                    self.remove(head.request_id)
                    return head, found
        return None

    def remove(self, request_id: str) -> Ticket | None:
        """Forget a ticket that waits (its caller left); None if it does not wait."""
        ticket = self._waiting.pop(request_id, None)
        if ticket is None:
            return None
        key = (float(ticket.place), ticket.place)
        self._bands[ticket.tier].remove(key)
        lane = self._lanes[ticket.tier, ticket.shape]
        lane.remove(key)
        if not len(lane):
            del self._lanes[ticket.tier, ticket.shape]
        if ticket.deadline is not None:
            self._deadlines.remove((ticket.deadline, ticket.place))
        return ticket

    def expire(self, now: float) -> tuple[Ticket, ...]:
        """Remove and return the tickets whose deadline has passed."""
        gone: list[Ticket] = []
        while (first := self._deadlines.first()) is not None:
            if first.deadline is None or first.deadline > now:
                break
            self.remove(first.request_id)
            gone.append(first)
        return tuple(gone)

    def reshape(self, shape: Callable[[Ticket], Hashable]) -> None:
        """Ask ``shape`` anew for everybody who waits (the route's weights have changed)."""
        for ticket in self.tickets():
            wanted = shape(ticket)
            if wanted != ticket.shape:
                self.remove(ticket.request_id)
                self._insert(dataclasses.replace(ticket, shape=wanted))

    def _insert(self, ticket: Ticket) -> None:
        key = (float(ticket.place), ticket.place)
        self._waiting[ticket.request_id] = ticket
        self._bands[ticket.tier].add(key, ticket)
        self._lanes.setdefault((ticket.tier, ticket.shape), _Line()).add(key, ticket)
        if ticket.deadline is not None:
            self._deadlines.add((ticket.deadline, ticket.place), ticket)


class DrainRate:
    """Departures of one band a second, counted only while somebody waits.

    Without that condition a quiet band would look slow, and refuse what it could serve at once.

    Args:
        window_s: how far back it looks.
        least: departures in the window that make the number worth believing.
    """

    def __init__(self, window_s: float = 10.0, least: int = 5) -> None:
        self._window_s = window_s
        self._least = least
        self._departures: collections.deque[float] = collections.deque(maxlen=1024)

    def departed(self, now: float, *, others_wait: bool) -> None:
        """Note that a request of the band was dispatched."""
        if others_wait:
            self._departures.append(now)

    def per_s(self, now: float) -> float | None:
        """Return the rate, or None where too little was seen."""
        while self._departures and self._departures[0] < now - self._window_s:
            self._departures.popleft()
        if len(self._departures) < self._least:
            return None
        # From the first departure to now: a band that has stalled since is getting slower.
        return len(self._departures) / max(now - self._departures[0], 0.001)


def retry_after_s(places: int, drain_per_s: float | None) -> float:
    """Return seconds until ``places`` have left at the measured rate, between 1 and 60."""
    return _clamp(places / drain_per_s if drain_per_s else MIN_RETRY_S)


def _clamp(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
