"""Where requests wait for a replica: the core's queues, joined to futures, quotas and the fleet.

Decisions are `scheduler.core.admission` and the routing behind `placing`; this module only keeps who waits,
asks again when something has changed (a grant closed, a view came, time passed), and wakes the winner.
It knows a request as an `asks.Asking`, so it may live in another process than the request's worker.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from gateway import (
    adapters,
    asks,
    demands,
    dependencies,
    local_waiter,
    model_queue,
    placing,
    reckoning,
    refusals,
    standing,
    turns,
    waiting,
)
from scheduler.contracts import errors, fleet, ids, observed, quota, requests
from scheduler.core import admission, fairness, load, routing

TICK_S = 0.05
_FREE = quota.Unlimited()


class LocalRoom:
    """All requests that wait for the models whose queues this process owns.

    Args:
        deps: the gateway's ports.
        draw: random numbers in [0, 1) for versions and ties.
    """

    def __init__(
        self, deps: dependencies.Dependencies, draw: Callable[[], float] = random.random
    ) -> None:
        self._deps = deps
        self._draw = draw
        self._known: standing.Standing | None = None
        self._models: dict[str, model_queue.ModelQueue] = {}
        self._waiters: dict[str, local_waiter.LocalWaiter] = {}
        self._grace = standing.Grace(deps.settings.no_replica_grace_s)
        self._gone = adapters.Gone()
        self.hurry = asyncio.Event()  # somebody waits for an adapter that no replica has
        self._reckon = reckoning.Reckoning(deps.settings, deps.clock)
        self.loads = load.Loads()
        self._placer = placing.Placer(self.loads, draw, deps.settings)
        self._turns = turns.Turns(deps, self._placer, self._models, self._waiters)
        self._demands = demands.Demands(self._models, self._waiters, self.loads)
        self._ended: Callable[[str], None] = lambda request_id: None

    @property
    def now(self) -> float:
        """Monotonic seconds of the gateway's clock."""
        return self._deps.clock.monotonic()

    def view(self) -> fleet.FleetView:
        """Return the newest view.

        Raises:
            errors.NoReplica: none has come yet.
        """
        view = self._deps.fleet.view()
        return self._standing().view if view is None else view

    async def run(self) -> None:
        """Keep time and the view until cancelled."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                await self._deps.clock.sleep(TICK_S)
                self.tick()
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def _watch(self) -> None:
        while True:
            await self._deps.fleet.changed(-1 if self._known is None else self._known.view.revision)
            if not self._refresh():
                await asyncio.sleep(0)  # a source whose revision went back must not spin the loop

    def hold(self, until: float) -> None:
        """Place nobody before monotonic second ``until``: what runs already is still being counted."""
        self._turns.held_until = until
        if until <= self.now:
            for model in list(self._models):
                self._turns.give(model)

    def tick(self) -> None:
        """End waits that have become useless, and try again what may go now."""
        now = self.now
        self._refresh()
        if (known := self._known) is None:
            return  # nobody has been let in yet
        for name, model in self._models.items():
            for ticket in model.queue.expire(now):
                waiter = self._waiters[ticket.request_id]
                waiter.settle(adapters.expired(known, waiter))
            for shape in model.queue.shapes():
                assert isinstance(shape, tuple)  # noqa: S101 - made by `asks.Needs.shape`
                version, adapter = shape[:2]
                if fault := self._gone.fault(known, name, adapter, now):
                    for ticket in model.queue.drop(shape):
                        told = refusals.adapter_fault(name, adapter, fault)
                        self._waiters[ticket.request_id].settle(told)
                elif self._absent(name, version, now):
                    only = requests.Tier.BATCH if known.wakes(name, version) else None
                    for ticket in model.queue.drop(shape, only):
                        self._waiters[ticket.request_id].settle(known.no_replica(name))
            self._turns.give(name)

    def enter(self, asking: asks.Asking) -> local_waiter.LocalWaiter:
        """Let a request wait, or give it a replica at once; see `waiting.Room.enter`."""
        known, now = self._standing(), self._deps.clock.monotonic()
        fresh = asking.request_id not in self._waiters
        self._replaced(asking)
        adapters.check(known, asking)
        draw = self._draw()
        needs = self._reckon.needs(asking, known, draw)
        if fresh:
            self._demands.came(asking, needs)
        if self._absent(asking.model, needs.version, now) and (
            asking.tier is requests.Tier.BATCH or not known.wakes(asking.model, needs.version)
        ):
            raise known.no_replica(asking.model)
        ticket = self._reckon.ticket(asking, needs, now)
        quotas = _FREE if asking.spare else self._deps.quotas
        hold = quotas.reserve(self._reckon.claim(asking, needs))
        waiter = local_waiter.LocalWaiter(asking, needs, ticket, draw, hold)
        model = self._model(asking.model)
        if asking.tier is requests.Tier.INTERACTIVE:
            model.interactive_at = now
        if asking.tier is not requests.Tier.BATCH:
            model.crowd.came(asking.team, now)
        self._waiters[asking.request_id] = waiter
        try:
            self._turns.admit(model, waiter, now)
            if (
                asking.adapter is not None
                and not waiter.dispatched
                and not known.takes(asking.model, needs.version, asking.adapter, asking.tier)
            ):  # where it waits for a seat alone, the next report is soon enough
                self.hurry.set()
        except BaseException as error:
            self.leave(waiter)  # of whatever it has taken by now
            if isinstance(error, errors.ForebayError):
                error.limits = hold.headers(self._deps.clock.wall_us())
            raise
        return waiter

    def adopt(
        self, asking: asks.Asking, replica: fleet.Replica, version: str
    ) -> local_waiter.LocalWaiter:
        """Count a request that runs already: another owner, or this one before, has admitted it."""
        self._replaced(asking)
        needs = self._reckon.running(asking, version)
        quotas = _FREE if asking.spare else self._deps.quotas
        hold = quotas.adopt(self._reckon.claim(asking, needs))
        waiter = local_waiter.LocalWaiter(
            asking, needs, self._reckon.ticket(asking, needs, self.now), 0.0, hold
        )
        model = self._model(asking.model)
        model.queue.pass_by(waiter.ticket, self.now)
        waiter.dispatched, waiter.turned_at = True, self.now
        guard = self._placer.adopt(asking, needs, replica.replica_id)
        waiter.open = self._turns.granted(model, waiter, replica, guard)
        self._waiters[asking.request_id] = waiter
        return waiter

    def rejoin(self, asking: asks.Asking) -> local_waiter.LocalWaiter:
        """Let a request wait again that had its turn with another owner, or this one before.

        It was let in already: no bound and no quota refuses it, and its wait has a new limit.

        Raises:
            errors.ForebayError: nothing could take it any more.
        """
        known, now = self._standing(), self._deps.clock.monotonic()
        self._replaced(asking)
        draw = self._draw()
        try:
            needs = self._reckon.needs(asking, known, draw)
        except errors.ForebayError:
            if asking.version is None:
                raise
            needs = self._reckon.running(asking, asking.version)  # its route has gone on
        ticket = self._reckon.ticket(asking, needs, now)
        if asking.deadline_us is None:
            ticket.deadline = now + self._deps.settings.deadline_s(asking.tier)
        hold = self._deps.quotas.adopt(self._reckon.claim(asking, needs))
        waiter = local_waiter.LocalWaiter(asking, needs, ticket, draw, hold)
        self._waiters[asking.request_id] = waiter
        queue = self._model(asking.model).queue
        queue.pass_by(ticket, now)
        queue.requeue(ticket, now)
        self._turns.give(asking.model)
        return waiter

    def _replaced(self, asking: asks.Asking) -> None:
        """Forget a request of the same id: it came over a link whose end was not noticed here."""
        before = self._waiters.get(asking.request_id)
        if before is not None:
            self.leave(before)

    def wait(self, waiter: waiting.Waiter) -> Coroutine[Any, Any, waiting.Grant]:
        """Return the replica when it is the waiter's turn; see `waiting.Room.wait`."""
        return _mine(waiter).wait()

    def again(
        self,
        waiter: waiting.Waiter,
        version: str | None = None,
        avoid: str | None = None,
        *,
        lost: bool = False,
    ) -> None:
        """Let a request that had its turn wait again, at its old place; see `waiting.Rooms.again`."""
        mine = _mine(waiter)
        now = self.now
        if lost and self._turns.blamed(mine, now):
            return
        mine.dispatched = False
        mine.asking = mine.asking.again(version, avoid)
        if avoid is not None and mine.asking.version is None:
            self._redraw(mine)
        anew_s = None if version is None else self._deps.settings.deadline_s(mine.asking.tier)
        mine.wait_on(now, anew_s)
        model = self._model(mine.asking.model)
        model.queue.requeue(mine.ticket, now)
        self._turns.give(mine.asking.model)

    def _redraw(self, mine: local_waiter.LocalWaiter) -> None:
        """Draw the version again: that of a replica that failed on the request may be a bad one."""
        with contextlib.suppress(errors.ForebayError):
            mine.needs = self._reckon.needs(mine.asking, self._standing(), mine.draw)
            shape = mine.needs.shape(mine.ticket.team)
            mine.ticket = dataclasses.replace(mine.ticket, shape=shape)

    def leave(self, waiter: waiting.Waiter, spent: quota.Spent = quota.NOTHING) -> None:
        """Forget a request, which has used ``spent``; a grant of it that is open is closed."""
        mine = _mine(waiter)
        asking = mine.asking
        if self._waiters.get(asking.request_id) is not mine:
            return
        del self._waiters[asking.request_id]
        model = self._model(asking.model)
        if not mine.dispatched:
            model.queue.remove(asking.request_id)
        mine.ring, mine._result = None, None
        mine.hold.settle(spent, self._deps.clock.wall_us())
        if mine.dispatched:
            cost = fairness.weighted(
                spent.uncached_prompt_tokens, spent.cached_prompt_tokens, spent.output_tokens
            )
            model.queue.settle(mine.ticket, cost, self._deps.clock.monotonic())
        if spent.tokens:
            self._reckon.learn(mine.asking, spent)
            if mine.placed is not None:
                self._placer.returned(mine.placed, spent)
        if mine.open is not None:
            mine.open.close()
        self._placer.suspects.forget(asking.request_id)

    def withdraw(self, waiter: waiting.Waiter) -> None:
        """Forget a request that waits elsewhere from now on; who awaits it here hears `Moved`."""
        mine = _mine(waiter)
        ring = mine.ring
        self.leave(mine)
        mine._result = refusals.Moved("moved")
        if ring is not None:
            ring()

    def hear(self, ended: Callable[[str], None]) -> None:
        """Call ``ended`` with the id of each request of this process that is cancelled at another."""
        self._ended = ended

    async def cancel(self, request_id: str, team: str, user: str) -> bool:
        """End a request of a caller's; see `waiting.Room.cancel`."""
        return self.cancelled(request_id, team, user)

    def cancelled(self, request_id: str, team: str, user: str) -> bool:
        """Let the worker that has a request end it; False if there is none of this caller's here."""
        found = self._waiters.get(request_id)
        if found is None or (found.asking.team, found.asking.user) != (team, user):
            return False
        (found.end or self._ended)(request_id)
        return True

    def full(self, replica: fleet.Replica, tier: requests.Tier, adapter: str = "") -> None:
        """Note that a replica had no seat for this tier, or lacked ``adapter``."""
        self.said_full(replica.replica_id, tier, adapter)

    def said_full(self, replica_id: str, tier: requests.Tier, adapter: str = "") -> None:
        """Note the same, of a replica known by its id."""
        if adapter:
            self._placer.lacks(ids.ReplicaId(replica_id), adapter, self.now)
        else:
            self._placer.full(ids.ReplicaId(replica_id), tier, self.now)

    def suspect(self, replica: fleet.Replica) -> None:
        """Note that a replica broke off an answer, or could not be reached."""
        self.suspected(replica.replica_id, replica.incarnation)

    def suspected(self, replica_id: str, incarnation: int) -> None:
        """Note the same, of a replica known by its id."""
        self._placer.suspect(ids.ReplicaId(replica_id), incarnation, self.now)

    def first_token(self, model: str, ms: float) -> None:
        """Note an interactive request's time to its first token."""
        self._demands.first_token(model, ms, self.now)

    def waiting(self, model: str) -> dict[str, int]:
        """Return how many wait for a model, by tier."""
        return self._demands.waiting(model)

    def demand(self) -> list[observed.Demand]:
        """Return what waits and runs now, by model: those that were routed or asked for."""
        routes = self._known.view.routes if self._known else {}
        return self._demands.report(routes, self.now)

    def seats(self) -> dict[str, tuple[int, int]]:
        """Return, by model, the seats in use and those free, as interactive requests see them."""
        return {name: model.seats for name, model in self._models.items()}

    def stale(self) -> dict[str, int]:
        """Return, by model, how many serving replicas have statistics too old to go by."""
        return self._placer.stale(self.now)

    def outlook(self, model: str, version: str | None = None) -> routing.Outlook:
        """Return whether a model serves now, soon, or not."""
        if self._known is None:
            return routing.Outlook.NONE
        return self._known.outlook(model, version, self._placer.dead(self.now))

    def _model(self, name: str) -> model_queue.ModelQueue:
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = model_queue.ModelQueue(self._deps.settings)
            if self._known is not None:
                found.count(self._known.of(name), self.loads)
        return found

    def _standing(self) -> standing.Standing:
        self._refresh()
        if self._known is None:
            raise refusals.no_view()
        return self._known

    def _refresh(self) -> bool:
        """Take in the source's newest view; returns whether it is another one."""
        view, before = self._deps.fleet.view(), self._known
        if view is None or (before is not None and view is before.view):
            return False
        known = self._known = standing.Standing(view)
        now = self.now
        self._placer.observe(view, now)
        for route in view.routes.values():
            for version in route.weights:
                self._absent(route.model, version, now)
        moved = (
            before is None
            or before.view.routes != view.routes
            or before.outlooks != known.outlooks  # a version's last replica went, or its first came
        )
        for name, model in self._models.items():
            model.count(known.of(name), self.loads)
            if moved and name in view.routes:
                model.queue.reshape(lambda ticket: self._reshape(ticket, known), now)
        for name in self._models:
            self._turns.give(name)
        return True

    def _reshape(self, ticket: admission.Ticket, known: standing.Standing) -> Hashable:
        waiter = self._waiters[ticket.request_id]
        try:
            waiter.needs = self._reckon.needs(waiter.asking, known, waiter.draw)
        except errors.ForebayError:
            return ticket.shape  # nothing routes there now: it waits for what it was admitted for
        return waiter.needs.shape(ticket.team)

    def _absent(self, model: str, version: str, now: float) -> bool:
        """Whether a version has had no replica, and none coming, for the whole grace time."""
        return self._grace.over((model, version), self.outlook(model, version), now)


def _mine(waiter: waiting.Waiter) -> local_waiter.LocalWaiter:
    if not isinstance(waiter, local_waiter.LocalWaiter):
        raise TypeError("a waiter of another room")
    return waiter
