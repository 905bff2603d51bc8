"""A request that waits with the process that owns its model's queue, as its own worker keeps it."""

import asyncio
from collections.abc import Callable

from gateway import asks
from gateway.admission import link
from scheduler.contracts import errors, fleet, quota


class RemoteGrant:
    """A `waiting.Grant` whose load the owner counts."""

    __slots__ = ("_closed", "_prefilled", "limits", "passed", "replica", "version")

    def __init__(
        self,
        replica: fleet.Replica,
        version: str,
        prefilled: Callable[[], None],
        closed: Callable[[], None],
        passed: Callable[[], None],
    ) -> None:
        self.replica = replica
        self.version = version
        self.limits: quota.Headers = ()
        self.passed = passed
        self._prefilled: Callable[[], None] | None = prefilled
        self._closed: Callable[[], None] | None = closed

    def prefilled(self) -> None:
        """Tell the owner; a second call does nothing."""
        prefilled, self._prefilled = self._prefilled, None
        if prefilled is not None and self._closed is not None:
            prefilled()

    def close(self) -> None:
        """Tell the owner; a second call does nothing."""
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()


class RemoteWaiter:
    """A `waiting.Waiter` whose place in the queue the owner keeps.

    Attributes:
        open: the grant that it has, until it is closed.
        queued: it waits for its turn, as far as is known here.
        known_to: the link over which the owner was told of it.
        turned: it has had its turn: an owner has let it in, and no other may refuse it.
    """

    __slots__ = ("_result", "arrived", "asking", "known_to", "open", "queued", "turned", "woken")

    def __init__(self, asking: asks.Asking, arrived: float) -> None:
        self.asking = asking
        self.arrived = arrived
        self.queued = True
        self.turned = False
        self.known_to: link.AnyLink | None = None
        self.open: RemoteGrant | None = None
        self.woken: asyncio.Future[None] | None = None
        self._result: RemoteGrant | errors.ForebayError | None = None

    def settle(self, result: RemoteGrant | errors.ForebayError) -> None:
        """Hand over what the owner said, also if nobody awaits it yet."""
        self.queued = False
        self._result = result
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)

    def collect(self) -> RemoteGrant | None:
        """Return what was settled, once; None if nothing was.

        Raises:
            errors.ForebayError: it was an error.
        """
        result, self._result = self._result, None
        if isinstance(result, errors.ForebayError):
            raise result
        return result
