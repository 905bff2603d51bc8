"""What the request path asks of admission: to wait, to get a replica, to say how it went.

`local_room.LocalRoom` is the real one where this process owns the queues; `admission.remote` asks the
process that does.
"""

from collections.abc import Callable
from typing import Protocol

from gateway import asks
from scheduler.contracts import fleet, quota, requests
from scheduler.core import routing


class Grant(Protocol):
    """A replica for one request, and the load that it counts until `close`."""

    @property
    def replica(self) -> fleet.Replica:
        """Where the request goes."""
        ...

    @property
    def version(self) -> str:
        """The version that was drawn."""
        ...

    @property
    def limits(self) -> quota.Headers:
        """What is left of the caller's quotas, as headers of its answer."""
        ...

    def prefilled(self) -> None:
        """Note that its prompt has been computed: the replica may have the next one."""
        ...

    def passed(self) -> None:
        """Note that the request has come further than where its last replica was lost."""
        ...

    def close(self) -> None:
        """Give the place back and let the next request have it; a second call does nothing."""
        ...


class Waiter(Protocol):
    """A request between its admission and its end."""

    @property
    def asking(self) -> asks.Asking:
        """Whose it is."""
        ...

    @property
    def arrived(self) -> float:
        """Monotonic seconds of its arrival."""
        ...


class Room(Protocol):
    """Where requests wait."""

    def view(self) -> fleet.FleetView:
        """Return the newest view of the fleet.

        Raises:
            errors.NoReplica: none has come yet.
        """
        ...

    def outlook(self, model: str, version: str | None = None) -> routing.Outlook:
        """Return whether a model serves now, soon, or not."""
        ...

    def enter(self, asking: asks.Asking) -> Waiter:
        """Let a request wait; never blocks. Follow with `wait` and, whatever happens, with `leave`.

        Raises:
            errors.ForebayError: it may not wait; `wait` may say so too.
        """
        ...

    async def wait(self, waiter: Waiter) -> Grant:
        """Return the replica for ``waiter`` when it is its turn; close the grant after use.

        Called again by a request on a spare seat (`asks.Asking.spare`) it ends only in `errors.Shed`:
        somebody waits, and the request must go.

        Raises:
            errors.Shed: the queue is full.
            errors.QuotaExceeded: its team or key has used up what it may.
            errors.Expired: its deadline has passed, or will have before its turn.
            errors.NoReplica: there is no replica and none on its way.
            errors.BadRequest: no replica could ever take it.
        """
        ...

    def again(
        self,
        waiter: Waiter,
        version: str | None = None,
        avoid: str | None = None,
        *,
        lost: bool = False,
    ) -> None:
        """Let a request that had its turn wait again, at its old place.

        Args:
            waiter: whose.
            version: of the answer that it has begun: it must stay, and waiting has a new limit.
            avoid: a replica whose engine failed on it; it goes there only if there is no other.
            lost: its replica was lost as it ran. Then `wait` may end in `errors.ReplicaLost`: the request
                is at fault. A request of tier batch does not wait again, and always hears that error.
        """
        ...

    def leave(self, waiter: Waiter, spent: quota.Spent = quota.NOTHING) -> None:
        """Forget a request, which has used ``spent``; a grant of it that is open is closed."""
        ...

    def full(self, replica: fleet.Replica, tier: requests.Tier, adapter: str = "") -> None:
        """Note that a replica had no seat for this tier, or lacked ``adapter``."""
        ...

    def first_token(self, model: str, ms: float) -> None:
        """Note an interactive request's time to its first token."""
        ...

    def suspect(self, replica: fleet.Replica) -> None:
        """Note that a replica broke off an answer, or could not be reached."""
        ...

    async def cancel(self, request_id: str, team: str, user: str) -> bool:
        """End a request of a caller's, whichever process has it; returns whether there was one."""
        ...

    def hear(self, ended: Callable[[str], None]) -> None:
        """Call ``ended`` with the id of each request of this process that is cancelled at another."""
        ...
