"""Where requests wait for a replica: the core's queues and routing, joined to futures and the fleet.

Decisions are `scheduler.core.admission` and `scheduler.core.routing`; this module only keeps who waits,
asks again when something has changed (a guard closed, a view came, time passed), and wakes the winner.
"""

import asyncio
import collections
import dataclasses
import logging
import random
from collections.abc import Callable, Hashable

from gateway import affinity, asks, dependencies
from scheduler.contracts import errors, fleet, ids, requests
from scheduler.core import admission, load, routing

TICK_S = 0.05
SUSPECT_S = 1.0  # a replica that cut a stream is not asked again for so long
NO_REPLICA_RETRY_S = 5.0
_log = logging.getLogger(__name__)


class Grant:
    """A replica for one request, and the load that it counts until `close`."""

    def __init__(
        self, replica: fleet.Replica, guard: load.Guard, freed: Callable[[ids.ReplicaId], None]
    ) -> None:
        self.replica = replica
        self._guard = guard
        self._freed = freed

    def close(self) -> None:
        """Give the place back and let the next request have it; a second call does nothing."""
        if not self._guard.closed:
            self._guard.close()
            self._freed(self.replica.replica_id)


@dataclasses.dataclass(eq=False, slots=True)
class Waiter:
    """A request between its admission and its end."""

    request: requests.InferenceRequest
    needs: asks.Needs
    ticket: admission.Ticket
    draw: float  # decides the version by the route's weights, also after the weights change
    print_: bytes | None
    woken: "asyncio.Future[None] | None" = None
    _result: "Grant | errors.ForebayError | None" = None

    def settle(self, result: "Grant | errors.ForebayError") -> None:
        """Hand over a grant or an error, also if nobody awaits it yet."""
        self._result = result
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)

    def collect(self) -> "Grant | None":
        """Return what was settled, once; None if nothing was.

        Raises:
            errors.ForebayError: it was an error.
        """
        result, self._result = self._result, None
        if isinstance(result, errors.ForebayError):
            raise result
        return result


class Room:
    """All waiting requests of one gateway worker.

    Args:
        deps: the gateway's ports.
        draw: random numbers in [0, 1) for versions and ties.
    """

    def __init__(
        self, deps: dependencies.Dependencies, draw: Callable[[], float] = random.random
    ) -> None:
        self._deps = deps
        self._draw = draw
        self._turn = 0
        self._view: fleet.FleetView | None = None
        self._freshness = routing.Freshness()
        self._homes = affinity.Homes()
        self._queues: dict[str, admission.Queue] = {}
        self._rates: collections.defaultdict[tuple[str, requests.Tier], admission.DrainRate] = (
            collections.defaultdict(admission.DrainRate)
        )
        self._waiters: dict[str, Waiter] = {}
        self._full: dict[tuple[ids.ReplicaId, bool], float] = {}
        self._suspects: dict[ids.ReplicaId, tuple[int, float]] = {}
        self._absent_since: dict[tuple[str, str], float] = {}
        self.loads = load.Loads()

    @property
    def now(self) -> float:
        """Monotonic seconds of the gateway's clock."""
        return self._deps.clock.monotonic()

    def view(self) -> fleet.FleetView:
        """Return the newest view.

        Raises:
            errors.NoReplica: none has come yet.
        """
        self._refresh()
        if self._view is None:
            raise errors.NoReplica(
                "the gateway has not heard of the fleet yet: ask again", retry_after_s=1.0
            )
        return self._view

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
            await self._deps.fleet.changed(-1 if self._view is None else self._view.revision)
            if not self._refresh():
                await asyncio.sleep(0)  # a source whose revision went back must not spin the loop

    def tick(self) -> None:
        """End waits that have become useless, and try again what may go now."""
        now = self.now
        self._refresh()
        for model, queue in self._queues.items():
            for ticket in queue.expire(now):
                self._settle(ticket, _expired(model))
            for ticket in queue.tickets():
                if self._hopeless(model, self._waiters[ticket.request_id].needs.version, now):
                    queue.remove(ticket.request_id)
                    self._settle(ticket, _no_replica(model))
            self._pump(model)

    def enter(self, request: requests.InferenceRequest) -> Waiter:
        """Let a request wait; follow with `wait` and, whatever happens, with `leave`.

        Raises:
            errors.Shed: the queue is full.
            errors.Expired: its deadline has passed, or will have before its turn.
            errors.NoReplica: there is no replica and none on its way.
            errors.BadRequest: no replica could ever take it.
        """
        view, now = self.view(), self.now
        draw = self._draw()
        needs = asks.needs(request, view, draw)
        if self._hopeless(request.model, needs.version, now):
            raise _no_replica(request.model)
        waiter = Waiter(
            request,
            needs,
            _ticket(self._deps, request, needs, now),
            draw,
            affinity.fingerprint(request),
        )
        queue = self._queues.setdefault(request.model, self._new_queue())
        rate = self._rates[request.model, request.tier].per_s(now)
        answer = queue.offer(waiter.ticket, now=now, drain_per_s=rate)
        if isinstance(answer, admission.Refused):
            raise _refusal(request, answer)
        waiter.ticket = answer.ticket
        self._waiters[request.request_id] = waiter
        for victim in answer.shed:
            self._settle(victim, _shed(victim.tier, admission.MIN_RETRY_S))
        self._pump(request.model)
        return waiter

    async def wait(self, waiter: Waiter) -> Grant:
        """Return the replica for ``waiter`` when it is its turn; close the grant after use.

        Raises:
            errors.ForebayError: why waiting is of no use any more.
        """
        grant = waiter.collect()
        if grant is not None:
            return grant
        waiter.woken = asyncio.get_running_loop().create_future()
        try:
            await waiter.woken
        finally:
            waiter.woken = None
        settled = waiter.collect()
        if settled is None:
            raise errors.Internal("woken without a replica; please report this")
        return settled

    def again(self, waiter: Waiter) -> None:
        """Let a request that had its turn wait again, at its old place."""
        self._queues[waiter.request.model].requeue(waiter.ticket)
        self._pump(waiter.request.model)

    def leave(self, waiter: Waiter) -> None:
        """Forget a request; a grant that it never collected is closed."""
        self._waiters.pop(waiter.request.request_id, None)
        self._queues[waiter.request.model].remove(waiter.request.request_id)
        try:
            grant = waiter.collect()
        except errors.ForebayError:
            return  # settled with an error that nobody waits for any more
        if grant is not None:
            grant.close()

    def full(self, replica: fleet.Replica, tier: requests.Tier) -> None:
        """Note that a replica had no seat for this tier."""
        batch = tier is requests.Tier.BATCH
        until = self.now + self._deps.settings.full_backoff_s
        self._full[replica.replica_id, batch] = until

    def suspect(self, replica: fleet.Replica) -> None:
        """Note that a replica broke off an answer, or could not be reached."""
        self._suspects[replica.replica_id] = (replica.incarnation, self.now + SUSPECT_S)

    def waiting(self, model: str) -> dict[str, int]:
        """Return how many wait for a model, by tier."""
        queue = self._queues.get(model)
        return queue.waiting() if queue else {tier.value: 0 for tier in requests.Tier}

    def oldest_wait_s(self, model: str) -> float:
        """Return how long the head of the model's interactive queue has waited."""
        queue = self._queues.get(model)
        head = queue.oldest(requests.Tier.INTERACTIVE) if queue else None
        return 0.0 if head is None else self.now - head.arrived

    def models(self) -> set[str]:
        """Return the models that were routed or asked for."""
        return {*self._queues, *(self._view.routes if self._view else ())}

    def outlook(self, model: str, version: str | None = None) -> routing.Outlook:
        """Return whether a model serves now, soon, or not."""
        replicas = self._view.replicas if self._view else ()
        return routing.outlook(replicas, model, version, self._dead(self.now))

    def _new_queue(self) -> admission.Queue:
        settings = self._deps.settings
        return admission.Queue(admission.Bounds(settings.queue_bounds(), settings.queue_total))

    def _refresh(self) -> bool:
        """Take in the source's newest view; returns whether it is another one."""
        view, before = self._deps.fleet.view(), self._view
        if view is None or view is before:
            return False
        self._view = view
        now = self.now
        self._freshness.observe(view.replicas, self.loads, now)
        for route in view.routes.values():
            for version in route.weights:
                self._hopeless(route.model, version, now)
        if before is None or before.routes != view.routes:
            for model, queue in self._queues.items():
                if model in view.routes:
                    queue.reshape(lambda ticket: self._reshape(ticket, view))
        for model in self._queues:
            self._pump(model)
        return True

    def _reshape(self, ticket: admission.Ticket, view: fleet.FleetView) -> Hashable:
        waiter = self._waiters[ticket.request_id]
        try:
            waiter.needs = asks.needs(waiter.request, view, waiter.draw)
        except errors.ForebayError:
            return ticket.shape  # nothing routes there now: it waits for what it was admitted for
        waiter.ticket = dataclasses.replace(ticket, shape=waiter.needs)
        return waiter.needs

    def _hopeless(self, model: str, version: str, now: float) -> bool:
        """Whether a version has had no replica, and none coming, for the whole grace time."""
        key = (model, version)
        if self.outlook(model, version) is not routing.Outlook.NONE:
            self._absent_since.pop(key, None)
            return False
        since = self._absent_since.setdefault(key, now)
        return now - since >= self._deps.settings.no_replica_grace_s

    def _dead(self, now: float) -> dict[ids.ReplicaId, int]:
        if self._suspects:
            self._suspects = {r: mark for r, mark in self._suspects.items() if mark[1] > now}
        return {replica_id: incarnation for replica_id, (incarnation, _) in self._suspects.items()}

    def _freed(self, model: str) -> Callable[[ids.ReplicaId], None]:
        def freed(replica_id: ids.ReplicaId) -> None:
            self._full.pop((replica_id, False), None)
            self._full.pop((replica_id, True), None)
            self._pump(model)

        return freed

    def _pump(self, model: str) -> None:
        """Place whoever can be placed now."""
        queue = self._queues.get(model)
        if queue is None or not len(queue) or self._view is None:
            return
        now = self.now
        if self._full:
            self._full = {mark: until for mark, until in self._full.items() if until > now}
        mine = [replica for replica in self._view.replicas if replica.spec.model == model]
        situation = routing.Situation(mine, self.loads, self._freshness.heard(now), self._dead(now))
        while (taken := queue.take(lambda ticket: self._place(ticket, situation))) is not None:
            ticket, grant = taken
            others = queue.oldest(ticket.tier) is not None
            self._rates[model, ticket.tier].departed(now, others_wait=others)
            self._settle(ticket, grant)

    def _place(self, ticket: admission.Ticket, situation: routing.Situation) -> Grant | None:
        waiter = self._waiters[ticket.request_id]
        request, needs = waiter.request, waiter.needs
        batch = request.tier is requests.Tier.BATCH
        ask = routing.Ask(
            model=request.model,
            version=needs.version,
            tier=request.tier,
            adapter=request.adapter,
            context_tokens=needs.context_tokens,
            seats=needs.seats,
            home=self._homes.find(waiter.print_),
            hint=request.cache_hint,
        )
        full = frozenset(replica_id for replica_id, of_batch in self._full if of_batch is batch)
        choice = routing.choose(
            ask, dataclasses.replace(situation, full=full, draw=self._draw(), turn=self._turn)
        )
        if choice is None:
            return None
        self._turn += 1
        replica_id = choice.replica.replica_id
        self._homes.note(waiter.print_, replica_id)
        _log.debug("%s -> %s: %s", request.request_id, replica_id, choice.reason)
        guard = self.loads.open(request.model, replica_id, request.tier, needs.seats)
        return Grant(choice.replica, guard, self._freed(request.model))

    def _settle(self, ticket: admission.Ticket, result: Grant | errors.ForebayError) -> None:
        self._waiters[ticket.request_id].settle(result)


def _ticket(
    deps: dependencies.Dependencies,
    request: requests.InferenceRequest,
    needs: asks.Needs,
    now: float,
) -> admission.Ticket:
    left_s = deps.settings.deadline_s(request.tier)
    if request.deadline_us is not None:
        left_s = (request.deadline_us - deps.clock.wall_us()) / 1_000_000
    return admission.Ticket(
        request.request_id, request.tier, request.caller.team, now, now + left_s, needs
    )


def _refusal(request: requests.InferenceRequest, refused: admission.Refused) -> errors.ForebayError:
    match refused.reason:
        case admission.Reason.QUEUE_FULL:
            return _shed(request.tier, refused.retry_after_s)
        case admission.Reason.EXPIRED:
            return _expired(request.model)
        case admission.Reason.UNMEETABLE:
            return errors.Expired(
                f"model {request.model}: the queue is longer than the deadline allows; give it "
                "more time or try later",
                retry_after_s=refused.retry_after_s,
            )


def _shed(tier: requests.Tier, retry_after_s: float) -> errors.Shed:
    return errors.Shed(
        f"too many {tier.value} requests wait: try again after {retry_after_s:.0f} s",
        retry_after_s=retry_after_s,
    )


def _expired(model: str) -> errors.Expired:
    return errors.Expired(f"model {model}: no replica was free before the deadline passed")


def _no_replica(model: str) -> errors.NoReplica:
    return errors.NoReplica(
        f"model {model}: no replica is up and none is starting; try again later",
        retry_after_s=NO_REPLICA_RETRY_S,
    )
