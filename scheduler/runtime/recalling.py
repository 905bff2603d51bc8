"""What a leader reads in the registry: what the one before held, and what admins wish by now."""

import asyncio
import logging
from collections.abc import Sequence

from scheduler.contracts import clock
from scheduler.core import floors
from scheduler.runtime import adapter_pools, live, overlap, schedules
from scheduler.runtime.registry import store, weight_acts

log = logging.getLogger(__name__)


async def held(registry: store.Registry, picture: live.Live, now: float) -> None:
    """Take up what the registry says is open, and what leaders before have measured."""
    picture.restore(await asyncio.to_thread(registry.holdings.load), now)
    starts = await asyncio.to_thread(registry.journal.fact, "starts")
    if starts is not None:
        picture.starts.restore(starts.body)
    adapters = await asyncio.to_thread(registry.journal.fact, adapter_pools.FACT)
    if adapters is not None:
        picture.adapters.restore(adapters.body)


async def overlapped(registry: store.Registry, time: clock.Clock) -> overlap.Overlap:
    """Return what rollovers have cost until now, by the leaders before."""
    told = await asyncio.to_thread(registry.journal.fact, overlap.FACT)
    hours = await asyncio.to_thread(registry.journal.fact, overlap.HOURS)
    return overlap.Overlap(
        told.body if told is not None else None,
        time.monotonic(),
        time.wall_us(),
        hours.body if hours is not None else None,
    )


async def wishes(
    registry: store.Registry,
    acts: weight_acts.WeightActs,
    picture: live.Live,
    time: clock.Clock,
) -> None:
    """Take up what admins wish: scaling, schedules, holds, drains."""
    deployments = await asyncio.to_thread(registry.catalog.deployments)
    routes = await asyncio.to_thread(registry.catalog.routes, picture.cluster)
    picture.rollouts = await asyncio.to_thread(registry.rollouts.all, under_way=True)
    drains = await asyncio.to_thread(registry.holdings.drains)
    picture.cordons = await asyncio.to_thread(registry.cordons.all)
    picture.weights.acts = await asyncio.to_thread(acts.all)
    picture.standing = await asyncio.to_thread(registry.wishes.read)
    timetable = await asyncio.to_thread(registry.timetable.all)
    _schedules(timetable, picture, time.wall_us())
    for replica_id in drains & picture.replicas.keys():
        picture.replicas[replica_id].drain_asked = True
    if (deployments, routes) != (picture.deployments, picture.routes):
        picture.deployments, picture.routes = deployments, routes
        picture.shadows.keep(routes)
        picture.starts.keep(frozenset(each.key for each in deployments))
        picture.touch()


def _schedules(timetable: Sequence[schedules.Schedule], picture: live.Live, now_us: int) -> None:
    """Take up what schedules ask for; one that can't be read on this host is said once."""
    found: list[floors.Floor] = []
    odd: set[str] = set()
    for schedule in timetable:
        try:
            found += schedules.in_force((schedule,), now_us)
        except ValueError as error:
            odd.add(str(error))
    for what in sorted(odd - picture.odd_schedules):
        log.warning("%s: passed over", what)
    picture.scheduled, picture.odd_schedules = tuple(found), odd
