"""Which replica takes a request, and what is in flight where: the core's router, kept up to date.

Told of views, of replicas that said "full" or broke off, and of the end of every request.
"""

import dataclasses
from collections.abc import Callable

from gateway import asks, settings
from scheduler.contracts import fleet, ids, quota, requests
from scheduler.core import load, reserving, router, routing, suspects

_TIMES = 32  # from there on any pause is the longest
SUSPECT_S = 1.0  # a replica that cut a stream is not asked again for so long


class Placer:
    """Places the requests of one owner of queues.

    Args:
        loads: what is in flight.
        draw: random numbers in [0, 1) that break ties.
        options: the [gateway] table.

    Attributes:
        suspects: who may have killed a replica, and where such are on trial.
    """

    def __init__(
        self,
        loads: load.Loads,
        draw: Callable[[], float],
        options: settings.GatewaySettings,
    ) -> None:
        self.loads = loads
        self.suspects = suspects.Suspects(options.replica_attempts)
        self._draw = draw
        self._full_backoff_s = options.full_backoff_s
        self._full_most_s = options.full_backoff_most_s
        self._router = router.Router(
            loads,
            options.routing_policy(),
            options.prefix_chunk_bytes,
            options.prefix_index_pairs,
        )
        self._full: dict[tuple[ids.ReplicaId, bool], float] = {}
        self._refused: dict[tuple[ids.ReplicaId, bool], int] = {}  # times since it served one
        self._lacks: dict[tuple[ids.ReplicaId, str], tuple[int, float]] = {}  # times, until
        self._suspects: dict[ids.ReplicaId, tuple[int, float]] = {}
        self._moments: dict[bool, router.Moment] = {}
        self._kept: dict[str, reserving.Kept] = {}
        self._beside: dict[tuple[str, bool], router.Moment] = {}

    def observe(self, view: fleet.FleetView, now: float) -> None:
        """Take in a view that came at ``now``."""
        self._router.observe(view.replicas, now)
        if self._refused:
            names = {replica.replica_id for replica in view.replicas}
            self._refused = {mark: n for mark, n in self._refused.items() if mark[0] in names}

    def prepare(self, now: float) -> None:
        """Get ready for placing some requests at ``now``."""
        if self._full:
            self._full = {mark: until for mark, until in self._full.items() if until > now}
        if self._lacks:
            least = now - self._full_most_s  # so long the number of times is remembered
            self._lacks = {mark: said for mark, said in self._lacks.items() if said[1] > least}
        dead = self.dead(now)
        self._moments = dict.fromkeys((False, True), router.Moment(now, dead))
        for batch in (False, True) if self._full else ():
            full = frozenset(name for name, of_batch in self._full if of_batch is batch)
            self._moments[batch] = router.Moment(now, dead, full)
        self._beside = {}
        for model, kept in self._kept.items():
            urgent = kept.lane[0] is not requests.Tier.BATCH
            for batch in (False, True) if urgent else (True,):
                at = self._moments[batch]
                self._beside[model, batch] = dataclasses.replace(
                    at, full=at.full | {kept.replica_id}
                )

    def place(
        self,
        asking: asks.Asking,
        needs: asks.Needs,
        left: float = 0.0,
        *,
        first: bool = False,
        apart: bool = False,
    ) -> router.Placed | None:
        """Return a replica and the load that is counted there from now on; None: no room now.

        Args:
            asking: the request.
            needs: what it needs.
            left: part of the replicas whose room it leaves to other teams.
            first: it may go to the replica that is kept.
            apart: it waits rather than be where a suspect is on trial; others only prefer not to be there.
        """
        batch = asking.tier is requests.Tier.BATCH
        moment = self._moments.get(batch)
        if moment is None:
            return None
        if self._beside and not first:
            moment = self._beside.get((asking.model, batch), moment)
        if asking.avoid and (avoided := self._avoided(asking, needs)):
            moment = dataclasses.replace(moment, full=moment.full | avoided)
        if needs.adapter and self._lacks:
            without = {
                replica_id
                for (replica_id, adapter), (_, until) in self._lacks.items()
                if adapter == needs.adapter and until > moment.now
            }
            if without:
                moment = dataclasses.replace(moment, full=moment.full | without)
        wanted, draw = _ask(asking, needs, left), self._draw()
        placed = None
        tried = self.suspects.tried
        if needs.suspected:
            known = tried | self.suspects.restless
            quiet = dataclasses.replace(moment, full=moment.full | known)
            placed = self._router.place(wanted, quiet, draw)
            if placed is None and apart and not batch:
                return None
        if placed is None and tried:
            others = dataclasses.replace(moment, full=moment.full | tried)
            placed = self._router.place(wanted, others, draw)
            if apart:
                return placed
        return placed or self._router.place(wanted, moment, draw)

    def _avoided(self, asking: asks.Asking, needs: asks.Needs) -> frozenset[ids.ReplicaId]:
        """Return the replicas that a request is kept from, if there is any other."""
        batch = asking.tier is requests.Tier.BATCH
        group = self._router.fleet.group(asking.model, needs.version, needs.adapter, batch=batch)
        avoided = frozenset(map(ids.ReplicaId, asking.avoid))
        if group is None or group.named.keys() <= avoided:
            return frozenset()
        return avoided

    def keep(self, model: str, kept: reserving.Kept | None) -> None:
        """Send nobody to a kept replica from the next `prepare` on but whom it is kept for."""
        if kept is None:
            self._kept.pop(model, None)
        else:
            self._kept[model] = kept

    def keepable(self, asking: asks.Asking, needs: asks.Needs, now: float) -> ids.ReplicaId | None:
        """Return the replica to be kept for a request, None if none could ever take it."""
        batch = asking.tier is requests.Tier.BATCH
        group = self._router.fleet.group(asking.model, needs.version, needs.adapter, batch=batch)
        if group is None:
            return None
        return reserving.choose(_ask(asking, needs), group, self.dead(now))

    def takes(self, asking: asks.Asking, needs: asks.Needs, replica_id: ids.ReplicaId) -> bool:
        """Return whether a replica is one of those that may take a request, room or not."""
        batch = asking.tier is requests.Tier.BATCH
        group = self._router.fleet.group(asking.model, needs.version, needs.adapter, batch=batch)
        if group is None or replica_id not in group.named:
            return False
        return not needs.long or replica_id in group.longs

    def adopt(
        self, asking: asks.Asking, needs: asks.Needs, replica_id: ids.ReplicaId
    ) -> load.Guard:
        """Count a request on a replica, whatever room that has: it runs there."""
        return self._router.adopt(_ask(asking, needs), replica_id)

    def returned(self, placed: router.Placed, spent: quota.Spent) -> None:
        """Learn from a request's counts what its replica's prefix cache held, and that it had room."""
        guard = placed.guard
        self._refused.pop((guard.replica_id, guard.tier is requests.Tier.BATCH), None)
        prompt = spent.uncached_prompt_tokens + spent.cached_prompt_tokens
        self._router.returned(
            placed, prompt_tokens=prompt, cached_tokens=spent.cached_prompt_tokens
        )

    def full(self, replica_id: ids.ReplicaId, tier: requests.Tier, now: float) -> None:
        """Note that a replica had no seat for this tier."""
        mark = replica_id, tier is requests.Tier.BATCH
        times = self._refused[mark] = min(self._refused.get(mark, 0) + 1, _TIMES)
        self._full[mark] = now + self._pause_s(times)

    def lacks(self, replica_id: ids.ReplicaId, adapter: str, now: float) -> None:
        """Note that a replica does not have an adapter that it has in the view: others may go there."""
        mark = replica_id, adapter
        times = min(self._lacks.get(mark, (0, 0.0))[0] + 1, _TIMES)
        self._lacks[mark] = times, now + self._pause_s(times)

    def _pause_s(self, times: int) -> float:
        pause_s = min(self._full_most_s, self._full_backoff_s * 2.0 ** (times - 1))
        # Of half to the whole, so that several owners don't come back at the same moment.
        return pause_s * (1 + self._draw()) / 2

    def suspect(self, replica_id: ids.ReplicaId, incarnation: int, now: float) -> None:
        """Note that a replica broke off an answer, or could not be reached."""
        self._suspects[replica_id] = (incarnation, now + SUSPECT_S)

    def freed(self, replica_id: ids.ReplicaId) -> None:
        """Note that a seat has come free: what it said before no longer counts."""
        self._full.pop((replica_id, False), None)
        self._full.pop((replica_id, True), None)

    def stale(self, now: float) -> dict[str, int]:
        """Return, by model, how many serving replicas are known by old statistics only, or by none."""
        found: dict[str, int] = {}
        for member in self._router.fleet.members():
            if member.replica.state is fleet.ReplicaState.SERVING and member.stale(now):
                model = member.replica.spec.model
                found[model] = found.get(model, 0) + 1
        return found

    def dead(self, now: float) -> dict[ids.ReplicaId, int]:
        """Return, per replica, the newest incarnation that is known to be gone."""
        if not self._suspects:
            return {}
        self._suspects = {r: mark for r, mark in self._suspects.items() if mark[1] > now}
        return {replica_id: incarnation for replica_id, (incarnation, _) in self._suspects.items()}


def _ask(asking: asks.Asking, needs: asks.Needs, left: float = 0.0) -> routing.Ask:
    return routing.Ask(
        model=asking.model,
        version=needs.version,
        tier=asking.tier,
        adapter=needs.adapter,
        context_tokens=needs.context_tokens,
        seats=needs.seats,
        prompt_tokens=needs.prompt_tokens,
        output_tokens=needs.seats * needs.output_tokens,
        room_tokens=needs.room_tokens,
        long=needs.long,
        left=left,
        prefix=asking.prefix,
        # A team's hints are its own: another's must not find its replica by guessing them.
        hint=f"{asking.team}\0{asking.cache_hint}" if asking.cache_hint is not None else None,
    )
