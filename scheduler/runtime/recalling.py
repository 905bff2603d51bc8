"""What a leader reads in the registry: what the one before held, and what admins wish by now."""

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TypeVar

from scheduler.contracts import clock
from scheduler.core import floors
from scheduler.runtime import adapter_pools, live, overlap, schedules
from scheduler.runtime.registry import store, weight_acts

log = logging.getLogger(__name__)
T = TypeVar("T")


async def held(registry: store.Registry, picture: live.Live, now: float) -> None:
    """Take up what the registry says is open, and what leaders before have measured."""
    picture.restore(await asyncio.to_thread(registry.holdings.load), now)
    for name, take in (
        ("starts", picture.starts.restore),
        (adapter_pools.FACT, picture.adapters.restore),
    ):
        fact = await asyncio.to_thread(registry.journal.fact, name)
        if fact is not None:
            _recall(name, functools.partial(take, fact.body))


async def overlapped(registry: store.Registry, time: clock.Clock) -> overlap.Overlap:
    """Return what rollovers have cost until now, by the leaders before."""
    told = await asyncio.to_thread(registry.journal.fact, overlap.FACT)
    hours = await asyncio.to_thread(registry.journal.fact, overlap.HOURS)
    fresh = functools.partial(overlap.Overlap, now=time.monotonic(), now_us=time.wall_us())
    known = functools.partial(
        fresh, told.body if told else None, hours=hours.body if hours else None
    )
    return _recall(overlap.FACT, known) or fresh(None)


def _recall(name: str, take: Callable[[], T]) -> T | None:
    """Take up what leaders before have measured; who can not read it leads all the same, and judges later."""
    try:
        return take()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        log.warning(
            "what leaders before have left of %s can't be read, it begins anew: %r", name, error
        )
        return None


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
    picture.timetable = await asyncio.to_thread(registry.timetable.all)
    _schedules(picture, time.wall_us())
    for replica_id in drains & picture.replicas.keys():
        picture.replicas[replica_id].drain_asked = True
    if (deployments, routes) != (picture.deployments, picture.routes):
        picture.deployments, picture.routes = deployments, routes
        picture.shadows.keep(routes)
        picture.starts.keep(frozenset(each.key for each in deployments))
        picture.touch()


def _schedules(picture: live.Live, now_us: int) -> None:
    """Take up what schedules ask for; one that can't be read on this host is said once."""
    found: list[floors.Floor] = []
    odd: set[str] = set()
    for schedule in picture.timetable:
        try:
            found += schedules.in_force((schedule,), now_us)
        except ValueError as error:
            odd.add(str(error))
    for what in sorted(odd - picture.odd_schedules):
        log.warning("%s: passed over", what)
    picture.scheduled, picture.odd_schedules = tuple(found), odd
