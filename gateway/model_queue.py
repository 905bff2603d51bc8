"""What the owner of a model's queue keeps of it: who waits, which seats are left, who is over a limit."""

import collections
from collections.abc import Sequence

from gateway import local_waiter, settings
from scheduler.contracts import fleet, requests
from scheduler.core import admission, crowding, drain, load, reserving

HOLDBACK_S = 60.0  # interactive requests that came this lately are reckoned to come again


class ModelQueue:
    """One model's queue, and how many seats its replicas have left.

    Seats are counted here only to answer quickly that nothing is left; routing has the last word.

    Attributes:
        queue: who waits.
        rates: how fast each band empties.
        interactive_at: monotonic seconds when an interactive request came last.
        longs: long prompts in flight, by team.
        crowd: whose interactive and standard requests are in flight.
        reserving: for whom a replica is kept.
        spares: requests on seats that nobody else wanted, by id; they end where others wait.
    """

    def __init__(self, options: settings.GatewaySettings) -> None:
        self._holdback = options.holdback
        self.queue = admission.Queue(options.queue_rules())
        self.rates = {tier: drain.DrainRate() for tier in requests.Tier}
        self.interactive_at = float("-inf")
        self.longs: collections.Counter[str] = collections.Counter()
        self.crowd = crowding.Crowd()
        self.reserving = reserving.Reserving(options.reserve_after_s)
        self.spares: dict[str, local_waiter.LocalWaiter] = {}
        self._ids: frozenset[str] = frozenset()
        self._alone: frozenset[str] = frozenset()  # replicas that are batch's alone
        self._seats = self._free = self._free_batch = self._free_alone = 0

    def count(self, replicas: Sequence[fleet.Replica], loads: load.Loads) -> None:
        """Count the seats that are left, anew with each view."""
        up = [replica for replica in replicas if replica.state is fleet.ReplicaState.SERVING]
        self._ids = frozenset(replica.replica_id for replica in up)
        batch = (replica for replica in up if replica.role is fleet.Role.BATCH)
        self._alone = frozenset(replica.replica_id for replica in batch)
        self._seats = self._free = self._free_batch = self._free_alone = 0
        for replica in up:
            if replica.role is not fleet.Role.BATCH:
                self._seats += replica.spec.seats
                self._free += replica.spec.seats - loads.urgent(replica.replica_id)
            if replica.role is not fleet.Role.INTERACTIVE:
                free = replica.spec.seats - loads.batch(replica.replica_id)
                self._free_batch += free
                self._free_alone += free if replica.replica_id in self._alone else 0

    @property
    def seats(self) -> tuple[int, int]:
        """Seats for interactive and standard requests: in use, and free."""
        free = max(0, self._free)
        return max(0, self._seats - free), free

    def opened(self, guard: load.Guard, long_team: str | None, change: int = 1) -> None:
        """Take in that a request was placed (or, with -1, has ended).

        Args:
            guard: its load.
            long_team: its team if its prompt is long.
            change: 1 or -1.
        """
        if long_team is not None:
            self.longs[long_team] += change
            if not self.longs[long_team]:
                del self.longs[long_team]
        if guard.replica_id not in self._ids:
            return
        if guard.tier is requests.Tier.BATCH:
            self._free_batch -= change * guard.seats
            if guard.replica_id in self._alone:
                self._free_alone -= change * guard.seats
        else:
            self._free -= change * guard.seats

    def closed(self, now: float) -> frozenset[requests.Tier]:
        """Return the bands that need not be asked: no seat is left that they might have.

        Standard leaves a part of the seats (`holdback`) to interactive requests, which could not make it
        give way, as long as these come at all; batch leaves each replica's reserved seats, and enters none
        that it shares while an interactive request waits, whatever that waits for.
        """
        kept = 0
        # One that has waited too long may have a seat that is kept: else it would wait for ever.
        if now - self.interactive_at < HOLDBACK_S and not self.queue.aged(now):
            kept = int(self._seats * self._holdback)
        waits = self.queue.oldest(requests.Tier.INTERACTIVE) is not None
        batch = self._free_alone if waits else self._free_batch
        if self._free > kept and batch > 0:
            return NONE
        closed = {requests.Tier.STANDARD} if self._free <= kept else set()
        if self._free <= 0:
            closed.add(requests.Tier.INTERACTIVE)
        if batch <= 0:
            closed.add(requests.Tier.BATCH)
        return frozenset(closed)


NONE: frozenset[requests.Tier] = frozenset()
ALL = frozenset(requests.Tier)
