"""A request whose answer has begun waits again: its version stays, and its wait has a new limit."""

import asyncio
import dataclasses

import pytest

from gateway import asks, dependencies, local_room, settings
from scheduler.contracts import clock, errors, fleet, ports, requests, usage
from tests.unit.gateway import fleets, harness


def room(view: fleet.FleetView, time: clock.FakeClock) -> local_room.LocalRoom:
    deps = dependencies.Dependencies(
        settings=settings.GatewaySettings(deadline_interactive_s=10.0),
        authenticator=ports.StaticKeys(harness.KEYS),
        fleet=ports.StaticFleet(view),
        sink=usage.MemorySink(),
        clock=time,
        cluster="c1",
    )
    return local_room.LocalRoom(deps, draw=lambda: 0.0)


def asking(time: clock.FakeClock) -> asks.Asking:
    tier = requests.Tier.INTERACTIVE
    return asks.Asking("q", "chat", tier, "physics", "ann", "k", time.wall_us())


@pytest.mark.parametrize("begun", [True, False])
async def test_an_answer_that_has_begun_gets_a_new_limit(begun: bool) -> None:
    time = clock.FakeClock()
    one = fleets.make_replica("r1")
    starting = dataclasses.replace(one, state=fleet.ReplicaState.STARTING)
    at = room(fleets.make_view([one]), time)
    waiter = at.enter(asking(time))
    grant = await at.wait(waiter)
    await time.advance(30.0)  # far beyond the time that it may have waited at first
    set_view(at, fleets.make_view([starting], revision=2))
    at.tick()
    grant.close()
    at.again(waiter, grant.version if begun else None)
    at.tick()
    set_view(at, fleets.make_view([one], revision=3))
    at.tick()
    async with asyncio.timeout(20):
        assert (await at.wait(waiter)).version == "1"


async def test_the_time_on_a_replica_is_no_waiting_and_waiting_still_ends() -> None:
    time = clock.FakeClock()
    one = fleets.make_replica("r1")
    at = room(fleets.make_view([one]), time)
    waiter = at.enter(asking(time))
    grant = await at.wait(waiter)
    await time.advance(30.0)
    starting = dataclasses.replace(one, state=fleet.ReplicaState.STARTING)
    set_view(at, fleets.make_view([starting], revision=2))
    at.tick()
    grant.close()
    at.again(waiter)
    await time.advance(10.0)
    at.tick()
    with pytest.raises(errors.Expired):
        await at.wait(waiter)


def set_view(at: local_room.LocalRoom, view: fleet.FleetView) -> None:
    source = at._deps.fleet
    assert isinstance(source, ports.StaticFleet)
    source.set(view)


async def test_an_answer_that_has_begun_keeps_its_version() -> None:
    time = clock.FakeClock()
    old = fleets.make_replica("r1")
    new = fleets.make_replica("r2", version="2")
    view = fleets.make_view([old, new])
    at = room(view, time)
    waiter = at.enter(asking(time))
    grant = await at.wait(waiter)
    assert grant.version == "1"
    set_view(at, fleets.make_view([old, new], revision=2, weights={"2": 100}))
    grant.close()
    at.again(waiter, grant.version)
    at.tick()
    async with asyncio.timeout(20):
        assert (await at.wait(waiter)).version == "1"
