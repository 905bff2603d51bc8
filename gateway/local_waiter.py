"""A request between its admission and its end, as the process that owns its model's queue keeps it."""

import asyncio
import dataclasses
from collections.abc import Callable

from gateway import asks
from scheduler.contracts import errors, fleet, quota
from scheduler.core import admission, load, router


class LocalGrant:
    """A `Grant` whose load is counted in this process."""

    __slots__ = ("_begun", "_freed", "_guard", "limits", "replica", "version")

    def __init__(
        self,
        replica: fleet.Replica,
        version: str,
        guard: load.Guard,
        begun: Callable[[str], None],
        freed: Callable[[load.Guard], None],
        limits: quota.Headers = (),
    ) -> None:
        self.limits = limits
        self.replica = replica
        self.version = version
        self._guard = guard
        self._begun = begun
        self._freed = freed

    def prefilled(self) -> None:
        """Note that its prompt has been computed: the replica may have the next one."""
        if self._guard.prefill and not self._guard.closed:
            self._guard.prefilled()
            self._begun(self._guard.model)

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
    ring: Callable[[], None] | None = None
    end: Callable[[str], None] | None = None
    open: LocalGrant | None = None
    placed: router.Placed | None = None
    _result: Result | None = None

    @property
    def arrived(self) -> float:
        """Monotonic seconds of its arrival."""
        return self.ticket.arrived

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
