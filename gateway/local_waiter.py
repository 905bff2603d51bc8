"""A request between its admission and its end, as the process that owns its model's queue keeps it."""

import asyncio
import dataclasses
from collections.abc import Callable

import msgspec

from gateway import asks
from scheduler.contracts import errors, fleet, quota, requests
from scheduler.core import admission, load, router

# How long people wait rather than be where a suspect is on trial (`suspects`): some trials long.
PATIENCE_S = 1.0  # what was lost itself
NEW_PATIENCE_S = 0.5  # others
RAN_S = 1.0  # on a replica for less: it was refused there


class LocalGrant:
    """A `Grant` whose load is counted in this process."""

    __slots__ = ("_begun", "_freed", "_guard", "limits", "passed", "replica", "version")

    def __init__(
        self,
        replica: fleet.Replica,
        version: str,
        guard: load.Guard,
        begun: Callable[[bool], None],
        freed: Callable[[load.Guard], None],
        limits: quota.Headers = (),
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self.passed = passed
        self.replica = replica
        self.version = version
        self._guard = guard
        self._begun = begun
        self._freed = freed

    def prefilled(self) -> None:
        """Note that its prompt has been computed: the replica may have the next one."""
        if not self._guard.closed:
            counted = self._guard.prefill > 0
            self._guard.prefilled()
            self._begun(counted)

    def close(self) -> None:
        """Give the place back and let the next request have it; a second call does nothing."""
        if not self._guard.closed:
            self._guard.close()
            self._freed(self._guard)


Result = LocalGrant | errors.ForebayError


@dataclasses.dataclass(eq=False, slots=True)
class LocalWaiter:
    """A `Waiter` of this process's `Room`.

    Attributes:
        draw: decides the version by the route's weights, also after the weights change.
        hold: what its quotas keep for it.
        dispatched: whether its team was charged for its turn.
        turned_at: monotonic seconds at which it had its last turn.
        lost_at: the same at which a replica was lost that it may have killed.
        ring: called when its wait has ended.
        end: ends it at the worker of another process that has it; None: this process has it.
        open: the grant that it has, if it was not closed yet.
        placed: where it was sent last.
    """

    asking: asks.Asking
    needs: asks.Needs
    ticket: admission.Ticket
    draw: float
    hold: quota.Hold
    dispatched: bool = False
    turned_at: float = 0.0
    lost_at: float = 0.0
    ring: Callable[[], None] | None = None
    end: Callable[[str], None] | None = None
    open: LocalGrant | None = None
    placed: router.Placed | None = None
    _result: Result | None = None

    @property
    def arrived(self) -> float:
        """Monotonic seconds of its arrival."""
        return self.ticket.arrived

    def suspect(self, lost: int) -> None:
        """Note with how many replicas it was lost that it may have killed: it stands with its like."""
        self.asking = self.asking.suspect(lost)
        self.needs = msgspec.structs.replace(self.needs, suspected=min(lost, 2))
        shape = self.needs.shape(self.ticket.team)
        self.ticket = dataclasses.replace(self.ticket, shape=shape)

    def apart(self, now: float) -> bool:
        """Whether it waits rather than be where a suspect is on trial, as of monotonic second ``now``.

        People do so for a moment only, unless two replicas were lost with what they asked: whom a suspect
        takes along loses more than that moment.
        """
        if self.asking.tier is requests.Tier.BATCH or self.needs.suspected > 1:
            return True
        if self.needs.suspected:
            return now - self.lost_at < PATIENCE_S
        return now - self.ticket.arrived < NEW_PATIENCE_S

    def wait_on(self, now: float, anew_s: float | None) -> None:
        """Wait again from monotonic second ``now`` on.

        The limit is one of waiting: the time that it ran on a replica does not count. (A refusal takes no
        time, and must not cost it its place among those of the same limit.)

        Args:
            now: monotonic seconds.
            anew_s: a new limit; None: what is left of the old one.
        """
        until = self.ticket.deadline
        if self.asking.deadline_us is not None or until is None:
            return
        ran_s = now - self.turned_at
        until += ran_s if ran_s >= RAN_S else 0.0
        if anew_s is not None:
            until = now + anew_s
        self.ticket = dataclasses.replace(self.ticket, deadline=until)

    def turn(self, grant: LocalGrant, now: float) -> None:
        """Hand over a grant: it is its turn, at monotonic second ``now``."""
        self.dispatched, self.turned_at = True, now
        self.settle(grant)

    def settle(self, result: Result) -> None:
        """Hand over a grant or an error, also if nobody awaits it yet."""
        self._result = result
        if isinstance(result, LocalGrant):
            self.open = result
        if self.ring is not None:
            self.ring()

    async def wait(self) -> LocalGrant:
        """Return the grant when there is one.

        Raises:
            errors.ForebayError: the wait has ended in it.
        """
        grant = self.collect()
        if grant is not None:
            return grant
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ring = lambda: None if woken.done() else woken.set_result(None)
        try:
            await woken
        finally:
            self.ring = None
        settled = self.collect()
        if settled is None:
            raise errors.Internal("woken without a replica; please report this")
        return settled

    def collect(self) -> LocalGrant | None:
        """Return what was settled, once; None if nothing was.

        Raises:
            errors.ForebayError: it was an error.
        """
        result, self._result = self._result, None
        if isinstance(result, errors.ForebayError):
            raise result
        return result
