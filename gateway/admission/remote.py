"""A worker's way to the process that owns the queues, over one link that comes back by itself.

What waits here and what runs here is kept on this side. When the owner is another one (it was started
again), the worker tells it all of that anew: who waits, in the order of arrival, and who runs where.
Running streams need no owner; who waits has to wait a little longer, and who comes while there is none for
too long is told so.
"""

import asyncio
import logging
from collections.abc import Callable

from gateway import asks, dependencies, refusals, standing
from gateway.admission import dialing, link, messages, remote_waiter
from gateway.waiting import Grant, Waiter
from scheduler.contracts import errors, fleet, quota, requests, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import routing

RETRY_S = 0.05
RETRY_MOST_S = 1.0
TICK_S = 0.25
AWAY_RETRY_S = 1.0
CANCEL_S = 1.0  # that an owner has to say whether it knows a request
_log = logging.getLogger(__name__)


class RemoteRoom:
    """A `waiting.Room` in another process.

    Args:
        deps: this worker's ports.
        dial: connects to the owner; it may be another one each time.
        token: the control token.
        worker: this worker's name.
    """

    def __init__(
        self, deps: dependencies.Dependencies, dial: dialing.Dial, token: str, worker: str
    ) -> None:
        self._deps = deps
        self._dial = dial
        self._hello = messages.Hello(token, worker)
        self._link: link.AnyLink | None = None
        self._lost = asyncio.Event()
        self._pause = RETRY_S
        self._away_since: float | None = deps.clock.monotonic()
        self._waiters: dict[str, remote_waiter.RemoteWaiter] = {}
        self._replicas: dict[int, fleet.Replica] = {}
        self._standing: standing.Standing | None = None
        self._cancelled: Callable[[str], None] = lambda request_id: None
        self._cancels: dict[int, tuple[messages.Cancel, asyncio.Future[bool]]] = {}
        self._asked = 0

    @property
    def connected(self) -> bool:
        """Whether the owner can be asked now."""
        return self._link is not None

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        ticking = asyncio.create_task(self._keep_time())
        try:
            while True:
                self._lost.clear()
                try:
                    await self._dial(self._protocol)
                    await self._lost.wait()
                except OSError as error:
                    _log.debug("admission: can't be reached: %s", error)
                await self._deps.clock.sleep(self._pause)
                self._pause = min(RETRY_MOST_S, self._pause * 2)
        finally:
            ticking.cancel()
            if self._link is not None:
                self._link.close()
            await asyncio.wait({ticking})

    async def _keep_time(self) -> None:
        while True:
            await self._deps.clock.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Give up waits for an owner that stays away."""
        if self._away():
            for waiter in list(self._waiters.values()):
                if waiter.queued:
                    waiter.settle(_away())

    def view(self) -> fleet.FleetView:
        """Return this worker's own newest view."""
        view = self._deps.fleet.view()
        if view is None:
            raise refusals.no_view()
        return view

    def outlook(self, model: str, version: str | None = None) -> routing.Outlook:
        """Return whether a model serves now, soon, or not."""
        view = self.view()
        if self._standing is None or self._standing.view is not view:
            self._standing = standing.Standing(view)
        return self._standing.outlook(model, version, {})

    def enter(self, asking: asks.Asking) -> remote_waiter.RemoteWaiter:
        """Let a request wait; see `waiting.Room.enter`. Refusals come from `wait`."""
        if self._away():
            raise _away()
        # What can't be told must not be kept: it would break the link again each time that it is told.
        messages.check(messages.Enter(asking))
        waiter = remote_waiter.RemoteWaiter(asking, self._deps.clock.monotonic())
        self._waiters[asking.request_id] = waiter
        self._ask(waiter)
        return waiter

    async def wait(self, waiter: Waiter) -> Grant:
        """Return the replica when it is the waiter's turn; see `waiting.Room.wait`."""
        mine = _mine(waiter)
        grant = mine.collect()
        if grant is not None:
            return grant
        mine.woken = asyncio.get_running_loop().create_future()
        try:
            await mine.woken
        finally:
            mine.woken = None
        settled = mine.collect()
        if settled is None:
            raise errors.Internal("woken without a replica; please report this")
        return settled

    def again(
        self,
        waiter: Waiter,
        version: str | None = None,
        avoid: str | None = None,
        *,
        lost: bool = False,
    ) -> None:
        """Let a request that had its turn wait again, at its old place; see `waiting.Rooms.again`."""
        mine = _mine(waiter)
        mine.open, mine.queued = None, True
        # The owner knows better whether it is more suspect for it; another owner knows nothing.
        asking = mine.asking.again(version, avoid)
        mine.asking = asking.suspect(asking.suspected + 1) if lost else asking
        if mine.known_to is self._link:
            self._say(messages.Again(mine.asking.request_id, version, avoid, lost))
        else:
            self._ask(mine)  # this owner does not know it: nothing of it ran when it came

    def leave(self, waiter: Waiter, spent: quota.Spent = quota.NOTHING) -> None:
        """Forget a request, which has used ``spent``; a grant of it that is open is closed."""
        mine = _mine(waiter)
        request_id = mine.asking.request_id
        if self._waiters.pop(request_id, None) is None:
            return
        if mine.open is not None:
            mine.open.close()
        self._say(
            messages.Leave(
                request_id,
                spent.uncached_prompt_tokens,
                spent.cached_prompt_tokens,
                spent.output_tokens,
            )
        )

    def withdraw(self, waiter: Waiter) -> None:
        """Forget a request that waits elsewhere from now on; who awaits it here hears `Moved`."""
        mine = _mine(waiter)
        self.leave(mine)
        mine.settle(refusals.Moved("moved"))

    def adopt(
        self, asking: asks.Asking, replica: fleet.Replica, version: str
    ) -> remote_waiter.RemoteWaiter:
        """Tell the owner of a request that runs already; its grant is the waiter's `open`."""
        waiter = remote_waiter.RemoteWaiter(asking, self._deps.clock.monotonic())
        waiter.queued, waiter.turned = False, True
        waiter.open = self._grant(waiter, replica, version)
        self._waiters[asking.request_id] = waiter
        waiter.known_to = self._link
        self._say(_adoption(asking, waiter.open))
        return waiter

    def rejoin(self, asking: asks.Asking) -> remote_waiter.RemoteWaiter:
        """Let a request wait again that had its turn with another owner."""
        waiter = remote_waiter.RemoteWaiter(asking, self._deps.clock.monotonic())
        waiter.turned = True
        self._waiters[asking.request_id] = waiter
        self._ask(waiter)
        return waiter

    def hear(self, ended: Callable[[str], None]) -> None:
        """Call ``ended`` with the id of each request of this process that is cancelled at another."""
        self._cancelled = ended

    async def cancel(self, request_id: str, team: str, user: str) -> bool:
        """End a request of a caller's; see `waiting.Room.cancel`. An owner that stays away knows of none."""
        self._asked += 1
        word = messages.Cancel(self._asked, request_id, team, user)
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._cancels[word.number] = word, told
        try:
            self._say(word)
            async with asyncio.timeout(CANCEL_S):
                return await told
        except TimeoutError:
            return False
        finally:
            del self._cancels[word.number]

    def full(self, replica: fleet.Replica, tier: requests.Tier, adapter: str = "") -> None:
        """Note that a replica had no seat for this tier, or lacked ``adapter``."""
        self._say(messages.Full(replica.replica_id, replica.incarnation, tier, adapter))

    def suspect(self, replica: fleet.Replica) -> None:
        """Note that a replica broke off an answer, or could not be reached."""
        self._say(messages.Suspect(replica.replica_id, replica.incarnation))

    def first_token(self, model: str, ms: float) -> None:
        """Note an interactive request's time to its first token."""
        self._say(messages.FirstToken(model, ms))

    def _protocol(self) -> link.AnyLink:
        made = link.Link(messages.from_owner, self._heard, self._ended)
        made.peer = "the owner"
        made.say(self._hello)
        return made

    def _heard(self, one: "link.Link[messages.FromOwner]", message: messages.FromOwner) -> None:
        if isinstance(message, messages.Granted):
            self._granted(message)
        elif isinstance(message, messages.Refused):
            waiter = self._waiters.get(message.request_id)
            if waiter is not None:
                waiter.settle(_rebuilt(message))
        elif isinstance(message, messages.Known):
            bare = pb.Replica.FromString(message.replica)
            self._replicas[message.number] = wire.replica_from_pb(bare)
        elif isinstance(message, messages.Ended):
            self._cancelled(message.request_id)
        elif isinstance(message, messages.Cancelled):
            asked = self._cancels.get(message.number)
            if asked is not None and not asked[1].done():
                asked[1].set_result(message.found)
        elif isinstance(message, messages.Welcome):
            self._welcome(one, message)

    def _welcome(self, one: link.AnyLink, message: messages.Welcome) -> None:
        """Say what waits and runs here: first what runs, so that its load counts before anybody's turn."""
        self._link, self._away_since, self._pause = one, None, RETRY_S
        self._replicas.clear()
        running = [waiter for waiter in self._waiters.values() if waiter.open is not None]
        for waiter in running:
            if waiter.open is not None:
                waiter.known_to = one
                one.say(_adoption(waiter.asking, waiter.open))
        waiting = [waiter for waiter in self._waiters.values() if waiter.queued]
        for waiter in sorted(waiting, key=lambda waiter: waiter.asking.arrived_us):
            self._ask(waiter)
        for word, _ in self._cancels.values():
            one.say(word)
        _log.info(
            "admission: %s is the owner; %d run, %d wait", message.owner, len(running), len(waiting)
        )

    def _granted(self, message: messages.Granted) -> None:
        waiter = self._waiters.get(message.request_id)
        if waiter is None:
            return  # it has left; the owner hears that next
        grant = self._grant(waiter, self._replicas[message.number], message.served)
        grant.limits = message.limits
        waiter.open, waiter.turned = grant, True
        waiter.settle(grant)

    def _grant(
        self, waiter: remote_waiter.RemoteWaiter, replica: fleet.Replica, version: str
    ) -> remote_waiter.RemoteGrant:
        def closed() -> None:
            waiter.open = None
            self._say(messages.Close(waiter.asking.request_id))

        def prefilled() -> None:
            self._say(messages.Prefilled(waiter.asking.request_id))

        def passed() -> None:
            waiter.asking = waiter.asking.suspect(0)
            self._say(messages.Passed(waiter.asking.request_id))

        return remote_waiter.RemoteGrant(replica, version, prefilled, closed, passed)

    def _ended(self, one: link.AnyLink) -> None:
        self._gone()
        self._lost.set()

    def _gone(self) -> None:
        if self._link is not None:
            _log.warning("admission: the owner is gone; running answers go on")
        self._link = None
        if self._away_since is None:
            self._away_since = self._deps.clock.monotonic()

    def _away(self) -> bool:
        since = self._away_since
        limit_s = self._deps.settings.admission_wait_s
        return since is not None and self._deps.clock.monotonic() - since > limit_s

    def _ask(self, waiter: remote_waiter.RemoteWaiter) -> None:
        waiter.known_to = self._link
        self._say(messages.Enter(waiter.asking, waiter.turned))

    def _say(self, message: messages.FromWorker) -> None:
        """Tell the owner; one that is away hears of what still holds when it is back."""
        if self._link is not None:
            self._link.say(message)


def _adoption(asking: asks.Asking, grant: remote_waiter.RemoteGrant) -> messages.Adopt:
    bare = wire.replica_to_pb(grant.replica).SerializeToString()
    return messages.Adopt(asking, bare, grant.version)


def _rebuilt(message: messages.Refused) -> errors.ForebayError:
    error = errors.from_code(message.code, message.message)
    error.retry_after_s, error.param = message.retry_after_s, message.param
    error.limits = message.limits
    if isinstance(error, errors.ReplicaLost):
        error.blame = message.blame
    return error


def _away() -> errors.NoReplica:
    return errors.NoReplica(
        "the gateway's admission is starting again: send the request again",
        retry_after_s=AWAY_RETRY_S,
    )


def _mine(waiter: Waiter) -> remote_waiter.RemoteWaiter:
    if not isinstance(waiter, remote_waiter.RemoteWaiter):
        raise TypeError("a waiter of another room")
    return waiter
