"""Hosts that split the models: each model waits at the one gateway that rendezvous hashing names.

Any host takes a request in and hands its asking over; when a host comes or goes, the models that move take
along who waits (in the order of arrival) and who runs (so that loads and quotas are right there).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from gateway import asks, refusals, waiting
from gateway.admission import ownership, remote
from scheduler.contracts import errors, fleet, quota, requests
from scheduler.core import routing

_log = logging.getLogger(__name__)


class Home(waiting.Room, Protocol):
    """A room from which a request can move, and to which."""

    def withdraw(self, waiter: waiting.Waiter) -> None:
        """Forget a request; who awaits its turn here hears `refusals.Moved`."""
        ...

    def adopt(self, asking: asks.Asking, replica: fleet.Replica, version: str) -> "Adopted":
        """Count a request that runs already."""
        ...

    def rejoin(self, asking: asks.Asking) -> waiting.Waiter:
        """Let a request wait again that had its turn in another room: it was let in already."""
        ...


class Adopted(waiting.Waiter, Protocol):
    """A waiter whose request runs."""

    @property
    def open(self) -> waiting.Grant | None:
        """The grant by which it runs."""
        ...


class _Grant:
    """A grant whose load may come to be counted elsewhere."""

    __slots__ = ("inner", "limits", "replica", "version")

    def __init__(self, inner: waiting.Grant) -> None:
        self.inner: waiting.Grant | None = inner
        self.replica = inner.replica
        self.version = inner.version
        self.limits = inner.limits

    def prefilled(self) -> None:
        """Note where it is counted now that its prompt has been computed."""
        if self.inner is not None:
            self.inner.prefilled()

    def passed(self) -> None:
        """Note where it is counted now that it has come further than where its last replica was lost."""
        if self.inner is not None:
            self.inner.passed()

    def close(self) -> None:
        """Give the place back where it is counted now."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.close()


class _Waiter:
    """A request, and the room that it is in now.

    Attributes:
        turned: it has had its turn.
        refused: why it is nowhere any more: the owner to which it moved would not have it.
    """

    __slots__ = ("arrived", "asking", "grant", "inner", "refused", "room", "turned")

    def __init__(self, room: Home, inner: waiting.Waiter) -> None:
        self.asking = inner.asking
        self.arrived = inner.arrived  # it stays: a move is no new arrival
        self.room = room
        self.inner = inner
        self.grant: _Grant | None = None
        self.turned = False
        self.refused: errors.ForebayError | None = None


class SplitRoom:
    """A `waiting.Room` over the rooms of every live gateway.

    Args:
        name: this host's gateway.
        own: its room.
        gateways: returns the newest list of live gateways.
        link: makes the room of another host; its `run` is kept going as long as it is needed.
    """

    def __init__(
        self,
        name: str,
        own: Home,
        gateways: Callable[[], tuple[fleet.Gateway, ...]],
        link: Callable[[fleet.Gateway], remote.RemoteRoom],
    ) -> None:
        self._name = name
        self._own = own
        self._gateways = gateways
        self._make = link
        self._live: tuple[fleet.Gateway, ...] = ()
        self._far: dict[fleet.Gateway, tuple[remote.RemoteRoom, asyncio.Task[None]]] = {}
        self._ended: Callable[[str], None] = lambda request_id: None
        self._waiters: dict[str, _Waiter] = {}

    def view(self) -> fleet.FleetView:
        """Return the newest view."""
        return self._own.view()

    def outlook(self, model: str, version: str | None = None) -> routing.Outlook:
        """Return whether a model serves now, soon, or not."""
        return self._own.outlook(model, version)

    def enter(self, asking: asks.Asking) -> _Waiter:
        """Let a request wait where its model's queue is; see `waiting.Room.enter`."""
        self.refresh()
        room = self._room(asking.model)
        waiter = self._waiters[asking.request_id] = _Waiter(room, room.enter(asking))
        return waiter

    async def wait(self, waiter: waiting.Waiter) -> waiting.Grant:
        """Return the replica when it is the waiter's turn; see `waiting.Room.wait`."""
        mine = self._mine(waiter)
        while True:
            if mine.refused is not None:
                raise mine.refused
            try:
                mine.grant = _Grant(await mine.room.wait(mine.inner))
            except refusals.Moved:
                continue
            mine.turned = True
            return mine.grant

    def again(
        self,
        waiter: waiting.Waiter,
        version: str | None = None,
        avoid: str | None = None,
        *,
        lost: bool = False,
    ) -> None:
        """Let a request that had its turn wait again, at its old place; see `waiting.Rooms.again`."""
        mine = self._mine(waiter)
        mine.grant = None
        room = self._room(mine.asking.model)
        if room is mine.room:
            room.again(mine.inner, version, avoid, lost=lost)
            mine.asking = mine.inner.asking
        else:
            asking = mine.inner.asking.again(version, avoid)
            mine.asking = asking.suspect(asking.suspected + lost)
            self._move(mine, room)  # its model moved between its end there and now

    def leave(self, waiter: waiting.Waiter, spent: quota.Spent = quota.NOTHING) -> None:
        """Forget a request, which has used ``spent``."""
        mine = self._mine(waiter)
        self._waiters.pop(mine.asking.request_id, None)
        mine.room.leave(mine.inner, spent)

    def hear(self, ended: Callable[[str], None]) -> None:
        """Call ``ended`` with the id of each request of this process that is cancelled at another."""
        self._ended = ended
        for room in (self._own, *(far for far, _ in self._far.values())):
            room.hear(ended)

    async def cancel(self, request_id: str, team: str, user: str) -> bool:
        """End a request of a caller's: nobody knows which model's it is, so every gateway is asked."""
        self.refresh()
        rooms = {self._own, *map(self._of, self._live)}
        return any(await asyncio.gather(*(room.cancel(request_id, team, user) for room in rooms)))

    def full(self, replica: fleet.Replica, tier: requests.Tier, adapter: str = "") -> None:
        """Note that a replica had no seat for this tier, or lacked ``adapter``."""
        self._room(replica.spec.model).full(replica, tier, adapter)

    def suspect(self, replica: fleet.Replica) -> None:
        """Note that a replica broke off an answer, or could not be reached."""
        self._room(replica.spec.model).suspect(replica)

    def first_token(self, model: str, ms: float) -> None:
        """Note an interactive request's time to its first token."""
        self._room(model).first_token(model, ms)

    async def run(self) -> None:
        """Follow the list of gateways until cancelled."""
        try:
            while True:
                self.refresh()
                await asyncio.sleep(0.1)
        finally:
            for _, task in self._far.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._far.values()), return_exceptions=True)

    def refresh(self) -> None:
        """Move what has another owner now.

        A list without this gateway is a broker's that has not heard of us yet: the last one holds.
        """
        live = self._gateways()
        if live == self._live or not any(one.gateway_id == self._name for one in live):
            return
        self._live = live
        moved = 0
        for waiter in list(self._waiters.values()):
            room = self._room(waiter.asking.model)
            if room is not waiter.room and waiter.refused is None:
                self._move(waiter, room)
                moved += 1
        used = {waiter.room for waiter in self._waiters.values()}
        for gateway in list(self._far):
            if gateway not in live and self._far[gateway][0] not in used:
                self._far.pop(gateway)[1].cancel()
        names = ", ".join(one.gateway_id for one in live)
        _log.info("admission: the gateways are %s; %d requests moved", names, moved)

    def _move(self, waiter: _Waiter, room: Home) -> None:
        old, inner, grant = waiter.room, waiter.inner, waiter.grant
        if grant is not None and grant.inner is None:
            return  # it has ended and settles where it ran
        waiter.refused = None
        try:
            if grant is not None:
                adopted = room.adopt(waiter.asking, grant.replica, grant.version)
                waiter.inner, grant.inner = adopted, adopted.open
            else:
                enter = room.rejoin if waiter.turned else room.enter
                waiter.inner = enter(waiter.asking)
            waiter.room = room
        except errors.ForebayError as error:
            # One that runs goes on uncounted; who waits hears it as its refusal.
            waiter.refused = error
        old.withdraw(inner)

    def _room(self, model: str) -> Home:
        found = ownership.owner(model, self._live)
        return self._own if found is None else self._of(found)

    def _of(self, gateway: fleet.Gateway) -> Home:
        """Return the room of a live gateway."""
        if gateway.gateway_id == self._name:
            return self._own
        if gateway not in self._far:
            room = self._make(gateway)
            room.hear(self._ended)
            task = asyncio.create_task(room.run(), name=f"link {gateway.admission}")
            self._far[gateway] = room, task
        return self._far[gateway][0]

    @staticmethod
    def _mine(waiter: waiting.Waiter) -> _Waiter:
        if not isinstance(waiter, _Waiter):
            raise TypeError("a waiter of another room")
        return waiter
