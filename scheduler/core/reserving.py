"""Which replica is kept for requests that smaller ones would pass by for ever. Pure.

A request that needs several seats, or much KV room, on one replica finds them only if they are free at one
moment; requests behind it that need less take each place as it comes free. So a lane (a tier and a shape)
whose head found no room, while one behind it was placed where the head might have gone, is noted; once that
has gone on for a set time, one replica is kept for it: nobody else is sent there until the head fits. It is
the reservation of EASY backfilling (Lifka, The ANL/IBM SP Scheduling System, 1995): one a model, so that the
rest of its replicas lose nothing. A lane of tier batch keeps its replica from other batch alone.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping

from scheduler.contracts import fleet, ids, requests
from scheduler.core import groups, routing

Lane = tuple[requests.Tier, Hashable]


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A replica, and the lane that it is kept for."""

    lane: Lane
    replica_id: ids.ReplicaId


class Reserving:
    """What one model's queue knows of lanes that are passed by.

    Args:
        after_s: how long a lane may be passed by before a replica is kept for it.

    Attributes:
        kept: the replica that is kept now, None if none is.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._missed: dict[Lane, str | None] = {}
        self._passed: dict[Lane, float] = {}
        self.kept: Kept | None = None

    def missed(self, lane: Lane, team: str | None = None) -> None:
        """Note that the head of a lane was asked and found no room.

        Args:
            lane: the lane.
            team: of the head where it leaves room to other teams: only its own can pass it by.
        """
        if lane not in self._passed:
            self._missed[lane] = team

    def granted(self, lane: Lane, team: str, could: Callable[[Lane], bool], now: float) -> None:
        """Note that a lane's head was placed: those asked before it were passed by.

        Args:
            lane: whose head it was.
            team: the head's.
            could: whether a lane's head might have gone to the same replica, had there been room.
            now: monotonic seconds.
        """
        self.forget(lane)
        passed = [each for each, own in self._missed.items() if own in (None, team) and could(each)]
        for each in passed:
            self._passed[each] = now
            del self._missed[each]

    def asked_anew(self) -> None:
        """Begin another round: who was asked in an earlier one was asked before nobody of this one."""
        self._missed.clear()

    def forget(self, lane: Lane) -> None:
        """Forget a lane that had its turn, is empty, or waits for something other than room."""
        self._missed.pop(lane, None)
        self._passed.pop(lane, None)
        if self.kept is not None and self.kept.lane == lane:
            self.kept = None

    def clear(self) -> bool:
        """Forget every lane: nobody waits. Returns whether a replica was kept."""
        self._missed.clear()
        self._passed.clear()
        kept, self.kept = self.kept, None
        return kept is not None

    def due(self, now: float) -> list[Lane]:
        """Return the lanes for which a replica is to be kept, who was passed by first in front."""
        if not self._passed:
            return []
        return [lane for lane, since in self._passed.items() if now - since >= self._after_s]

    def keep(self, lane: Lane, replica_id: ids.ReplicaId) -> None:
        """Keep a replica for a lane from now on."""
        self.kept = Kept(lane, replica_id)


def choose(
    ask: routing.Ask, group: groups.Group, dead: Mapping[ids.ReplicaId, int]
) -> ids.ReplicaId | None:
    """Return the replica that will have room for a request first, None if none ever will.

    Args:
        ask: the request.
        group: those that may take its kind.
        dead: per replica, the newest incarnation that is known to be gone.
    """
    batch = ask.tier is requests.Tier.BATCH
    best: tuple[int, float, int, str] | None = None
    for member in group.members:
        held, spec = member.load, member.replica.spec
        seats = member.seats
        if batch and member.replica.role is not fleet.Role.BATCH:
            seats -= spec.reserved_seats
        if (
            ask.seats > seats
            or ask.context_tokens > spec.max_context
            or (ask.long and member.replica_id not in group.longs)
            or member.replica.incarnation <= dead.get(member.replica_id, -1)
        ):
            continue
        taken, kv = held.urgent, held.urgent_kv
        if batch:
            taken, kv = taken + held.batch, kv + held.batch_kv
        missing = max(0, taken + ask.seats - seats)
        lacking = max(0.0, kv + ask.kv_tokens - member.kv_limit) if taken else 0.0
        found = missing, lacking, held.tokens, member.replica_id
        if best is None or found < best:
            best = found
    return None if best is None else ids.ReplicaId(best[3])
