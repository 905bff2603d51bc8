"""Gives turns: asks routing for a replica, in the order of a model's queue, for whoever can have one now.

`local_room.LocalRoom` says when; what comes of it is told to the waiters.
"""

import asyncio
from collections.abc import Mapping

from gateway import dependencies, local_waiter, model_queue, placing, refusals
from scheduler.contracts import errors, fleet, requests
from scheduler.core import admission, drain, load, reserving


class Turns:
    """Gives the turns of the models whose queues this process owns.

    Args:
        deps: the gateway's ports.
        placer: chooses replicas.
        models: the queues, as the room keeps them.
        waiters: the requests in them and on replicas, by id.

    Attributes:
        held_until: monotonic seconds before which nobody is placed.
    """

    def __init__(
        self,
        deps: dependencies.Dependencies,
        placer: placing.Placer,
        models: Mapping[str, model_queue.ModelQueue],
        waiters: Mapping[str, local_waiter.LocalWaiter],
    ) -> None:
        self._options = deps.settings
        self._clock = deps.clock
        self._placer = placer
        self._models = models
        self._waiters = waiters
        self._soon: set[str] = set()
        self.held_until = float("-inf")

    def admit(
        self, model: model_queue.ModelQueue, waiter: local_waiter.LocalWaiter, now: float
    ) -> None:
        """Place a request at once where nobody waits, else let it queue.

        Raises:
            errors.ForebayError: the queue would not have it.
        """
        asking = waiter.asking
        if self.at_once(model, waiter, now):
            return
        if asking.spare:
            raise refusals.no_spare(asking.model)
        rate = model.rates[asking.tier].per_s(now)
        answer = model.queue.offer(waiter.ticket, now=now, drain_per_s=rate)
        if isinstance(answer, admission.Refused):
            raise refusals.refusal(asking.model, asking.tier, answer)
        for victim in answer.shed:
            after = drain.retry_after_s(1, model.rates[victim.tier].per_s(now))
            self._waiters[victim.request_id].settle(refusals.shed(victim.tier, after))
        self.give(asking.model)

    def at_once(
        self, model: model_queue.ModelQueue, waiter: local_waiter.LocalWaiter, now: float
    ) -> bool:
        """Give a request its turn without a wait, if nobody else waits; returns whether it has it."""
        ticket = waiter.ticket
        in_time = ticket.deadline is None or ticket.deadline > now
        if len(model.queue) or not in_time or ticket.tier in model.closed(now):
            return False
        self._idle(waiter.asking.model, model)
        self._placer.prepare(now)
        grant = self._place(model, waiter, set(), now)
        if not isinstance(grant, local_waiter.LocalGrant):
            return False
        model.queue.pass_by(ticket, now)
        waiter.turn(grant, now)
        return True

    def blamed(self, waiter: local_waiter.LocalWaiter, now: float) -> bool:
        """Judge a request whose replica was lost; returns whether it was told so, and waits no more."""
        asking = waiter.asking
        blame = self._placer.suspects.lost(asking.request_id, now)
        told = refusals.blamed(asking.tier, asking.suspected, blame)
        if told is not None:
            waiter.settle(told)
        elif blame is errors.Blame.SHARED:
            waiter.suspect(asking.suspected + 1)
            waiter.lost_at = now
        return told is not None

    def soon(self, name: str) -> None:
        """Give turns once this turn of the event loop is over.

        By then whoever was told "full" has said so and waits again at its old place; and several that end
        at once are one question to routing.
        """
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._all)
        self._soon.add(name)

    def _all(self) -> None:
        names, self._soon = self._soon, set()
        for name in names:
            self.give(name)

    def give(self, name: str) -> None:
        """Place whoever can be placed now."""
        model = self._models[name]
        now = self._clock.monotonic()
        if now < self.held_until:
            return
        if not len(model.queue):
            self._idle(name, model)
            return
        model.reserving.asked_anew()
        self._reserve(name, model, now)
        closed = model.closed(now)
        if closed == model_queue.ALL:
            self._shed(name, model)
            return
        self._placer.prepare(now)

        tried: set[object] = set()  # nothing comes free before this is over

        def place(ticket: admission.Ticket) -> local_waiter.LocalGrant | admission.Pass | None:
            return self._place(model, self._waiters[ticket.request_id], tried, now)

        model.reserving.asked_anew()
        while (taken := model.queue.take(place, now, closed)) is not None:
            self._taken(model, *taken, now)
            model.reserving.asked_anew()
            closed = model.closed(now)
        self._shed(name, model)

    @staticmethod
    def _shed(name: str, model: model_queue.ModelQueue) -> None:
        """Tell those on spare seats to leave while somebody waits; they hear it from a second `wait`."""
        if model.spares and len(model.queue):
            spares, model.spares = model.spares, {}
            for waiter in spares.values():
                waiter.settle(refusals.no_spare(name))

    def granted(
        self,
        model: model_queue.ModelQueue,
        waiter: local_waiter.LocalWaiter,
        replica: fleet.Replica,
        guard: load.Guard,
    ) -> local_waiter.LocalGrant:
        """Return the grant of a replica, whose end lets others have their turn."""
        team = waiter.asking.team
        long_team = team if waiter.needs.long else None
        urgent = guard.tier is not requests.Tier.BATCH

        request_id, suspects = waiter.asking.request_id, self._placer.suspects

        def freed(guard: load.Guard) -> None:
            waiter.open = None
            suspects.closed(request_id)
            model.spares.pop(request_id, None)
            model.opened(guard, long_team, -1)
            if urgent:
                model.crowd.ran(team, -1)
            self._placer.freed(guard.replica_id)
            self.soon(guard.model)

        def begun(counted: bool) -> None:
            suspects.shown(request_id, self._clock.monotonic())
            if counted:
                self.soon(guard.model)

        def passed() -> None:
            waiter.suspect(0)
            if suspects.passed(request_id):
                self.soon(guard.model)

        life = replica.replica_id, replica.incarnation
        suspects.placed(request_id, life, waiter.asking.suspected)
        model.opened(guard, long_team)
        if waiter.asking.spare:
            model.spares[waiter.asking.request_id] = waiter
        if urgent:
            model.crowd.ran(team, 1)
        limits = waiter.hold.headers(self._clock.wall_us())
        return local_waiter.LocalGrant(
            replica, waiter.needs.version, guard, begun, freed, limits, passed
        )

    def _taken(
        self,
        model: model_queue.ModelQueue,
        ticket: admission.Ticket,
        grant: local_waiter.LocalGrant,
        now: float,
    ) -> None:
        others = model.queue.oldest(ticket.tier) is not None
        model.rates[ticket.tier].departed(now, others_wait=others)
        replica_id = grant.replica.replica_id

        def could(lane: reserving.Lane) -> bool:
            head = model.queue.head(*lane)
            if head is None:
                return False
            passed = self._waiters[head.request_id]
            return self._placer.takes(passed.asking, passed.needs, replica_id)

        model.reserving.granted((ticket.tier, ticket.shape), ticket.team, could, now)
        self._waiters[ticket.request_id].turn(grant, now)

    def _reserve(self, name: str, model: model_queue.ModelQueue, now: float) -> None:
        """Keep a replica for whom smaller requests have passed by for too long, or give it to them."""
        lanes = model.reserving
        due = lanes.due(now)
        if due:
            self._placer.prepare(now)
        for lane in due:
            ticket = model.queue.head(*lane)
            if ticket is None or self._limited(model, self._waiters[ticket.request_id]):
                lanes.forget(lane)
                continue
            waiter = self._waiters[ticket.request_id]
            apart = waiter.apart(now)
            placed = self._placer.place(waiter.asking, waiter.needs, first=True, apart=apart)
            if placed is not None:
                waiter.placed = placed
                grant = self.granted(model, waiter, placed.replica, placed.guard)
                model.queue.pull(ticket, now)
                self._taken(model, ticket, grant, now)
                continue
            if lanes.kept is not None and (
                lanes.kept.lane != lane
                or self._placer.takes(waiter.asking, waiter.needs, lanes.kept.replica_id)
            ):
                continue
            replica_id = self._placer.keepable(waiter.asking, waiter.needs, now)
            if replica_id is not None:
                lanes.keep(lane, replica_id)
        self._placer.keep(name, lanes.kept)

    def _idle(self, name: str, model: model_queue.ModelQueue) -> None:
        """Keep nothing for anybody: nobody waits."""
        if model.reserving.clear():
            self._placer.keep(name, None)

    def _limited(self, model: model_queue.ModelQueue, waiter: local_waiter.LocalWaiter) -> bool:
        """Whether a request's team has as many long prompts in flight as it may have."""
        team = waiter.asking.team
        return waiter.needs.long and model.longs[team] >= self._options.long_per_team

    def _place(
        self,
        model: model_queue.ModelQueue,
        waiter: local_waiter.LocalWaiter,
        tried: set[object],
        now: float,
    ) -> local_waiter.LocalGrant | admission.Pass | None:
        """Ask routing for a replica, unless it has said no to the like of it since ``tried`` was empty."""
        asking, needs = waiter.asking, waiter.needs
        if now < self.held_until or self._limited(model, waiter):
            return None
        left = 0.0
        if asking.tier is not requests.Tier.BATCH and model.crowd.crowds(asking.team, now):
            left = self._options.team_holdback
        shape = waiter.ticket.shape
        apart = waiter.apart(now)
        like = (asking.tier, shape, left, asking.avoid, apart)
        placed = None if like in tried else self._placer.place(asking, needs, left, apart=apart)
        if placed is None:
            tried.add(like)
            lane = asking.tier, shape
            if left or asking.avoid:
                model.reserving.missed(lane, asking.team)
                return admission.Pass.TEAM
            model.reserving.missed(lane)
            return None
        waiter.placed = placed
        return self.granted(model, waiter, placed.replica, placed.guard)
