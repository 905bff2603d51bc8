"""The waiting room on a clock that the test moves: expiry, absence, shedding, routes that change."""

import asyncio
import dataclasses
from typing import Any

import pytest

from gateway import asks, dependencies, local_room, settings, waiting
from scheduler.contracts import clock, errors, fleet, ids, ports, requests, usage
from tests.unit.gateway import fleets, harness

I, B = requests.Tier.INTERACTIVE, requests.Tier.BATCH  # noqa: E741 - tiers


NOW_US = clock.FakeClock().wall_us()


def ask(name: str, tier: requests.Tier = I, **fields: Any) -> asks.Asking:
    return asks.of(inference(name, tier, **fields))


def inference(name: str, tier: requests.Tier = I, **fields: Any) -> requests.InferenceRequest:
    return requests.InferenceRequest(
        request_id=ids.RequestId(name),
        endpoint=requests.Endpoint.CHAT,
        body=fields.pop("body", harness.chat_body()),
        model="chat",
        tier=tier,
        caller=fields.pop("caller", harness.ANN),
        stream=False,
        arrived_us=fields.pop("arrived_us", NOW_US),
        **fields,
    )


def room(
    time: clock.FakeClock, view: fleet.FleetView, draw: float = 0.0, **options: Any
) -> tuple[local_room.LocalRoom, ports.StaticFleet]:
    source = ports.StaticFleet(view)
    deps = dependencies.Dependencies(
        settings.GatewaySettings(**options),
        ports.StaticKeys(harness.KEYS),
        source,
        usage.MemorySink(),
        time,
        "c1",
    )
    return local_room.LocalRoom(deps, lambda: draw), source


async def outcome(made: local_room.LocalRoom, waiter: waiting.Waiter) -> str:
    """Return the replica that the waiter has got, or its error's code."""
    try:
        return (await asyncio.wait_for(made.wait(waiter), 20)).replica.replica_id
    except errors.ForebayError as error:
        return error.code


async def test_seats_are_handed_on_as_they_come_free(fake_clock: clock.FakeClock) -> None:
    made, _ = room(fake_clock, fleets.make_view([fleets.make_replica("r1", seats=1)]))
    first, second, third = (made.enter(ask(name)) for name in "abc")
    grant = await made.wait(first)
    assert made.waiting("chat")["interactive"] == 2
    waits = asyncio.create_task(made.wait(second))
    await fake_clock.advance(0)
    assert not waits.done()
    grant.close()
    grant.close()
    (await waits).close()
    assert await outcome(made, third) == "r1"
    for waiter in (first, second, third):
        made.leave(waiter)
    assert made.waiting("chat")["interactive"] == 0


async def test_a_grant_that_nobody_collects_is_given_back(fake_clock: clock.FakeClock) -> None:
    made, source = room(fake_clock, fleets.make_view([]))
    waiter = made.enter(ask("a"))
    task = asyncio.create_task(made.wait(waiter))
    await fake_clock.advance(0)
    source.set(fleets.make_view([fleets.make_replica("r1")], revision=2))
    made.tick()  # grants, and in the same breath the client leaves
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not made.loads.idle
    made.leave(waiter)
    assert made.loads.idle


async def test_expiry_and_absence(fake_clock: clock.FakeClock) -> None:
    starting = fleets.make_replica("r1", state=fleet.ReplicaState.STARTING)
    view = fleets.make_view([starting])
    made, source = room(fake_clock, view, deadline_interactive_s=10, no_replica_grace_s=5)
    soon = made.enter(ask("soon", deadline_us=fake_clock.wall_us() + 2_000_000))
    late = made.enter(ask("late"))
    await fake_clock.advance(1.9)
    made.tick()
    assert made.demand()[0].oldest_wait_s == pytest.approx(1.9)
    await fake_clock.advance(0.2)
    made.tick()
    assert await outcome(made, soon) == "deadline_exceeded"
    source.set(fleets.make_view([], revision=2))
    made.tick()
    await fake_clock.advance(4.9)
    made.tick()
    assert made.waiting("chat")["interactive"] == 1  # a restart is no reason to fail
    await fake_clock.advance(0.2)
    made.tick()
    assert await outcome(made, late) == "no_replica"
    with pytest.raises(errors.NoReplica):
        made.enter(ask("next"))
    source.set(dataclasses.replace(view, revision=3))
    made.enter(ask("again"))  # one starts: waiting makes sense


async def test_batch_does_not_wait_for_a_model_at_zero(fake_clock: clock.FakeClock) -> None:
    """Nobody starts a replica for it, and it would have waited out its deadline, an hour."""
    view = fleets.make_view([], wakes=("1",))
    made, _ = room(fake_clock, view, no_replica_grace_s=5)
    line, person = made.enter(ask("b", B)), made.enter(ask("i"))
    await fake_clock.advance(5.1)
    made.tick()
    assert await outcome(made, line) == "no_replica"
    assert made.waiting("chat") == {"interactive": 1, "standard": 0, "batch": 0}
    with pytest.raises(errors.NoReplica):
        made.enter(ask("b2", B))
    made.leave(made.enter(ask("i2")))
    made.leave(person)


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.6, 0.9])
async def test_who_names_no_version_waits_for_one_that_may_start(
    fake_clock: clock.FakeClock, draw: float
) -> None:
    """Drawn to one in quarantine it would be sent away, though another is started for it."""
    view = fleets.make_view([], wakes=("2",), weights={"1": 99, "2": 1})
    made, _ = room(fake_clock, view, draw, no_replica_grace_s=0)
    with pytest.raises(errors.NoReplica):
        made.enter(ask("pinned", version="1"))
    waiter = made.enter(ask("free"))
    made.tick()
    assert made.waiting("chat")["interactive"] == 1
    made.leave(waiter)


async def test_batch_is_shed_for_interactive(fake_clock: clock.FakeClock) -> None:
    starting = fleets.make_replica("r1", state=fleet.ReplicaState.STARTING)
    made, _ = room(fake_clock, fleets.make_view([starting]), queue_total=2)
    first, second = made.enter(ask("b1", B)), made.enter(ask("b2", B))
    made.enter(ask("i1"))
    assert await outcome(made, second) == "overloaded"
    made.leave(second)
    with pytest.raises(errors.Shed):
        made.enter(ask("b3", B))
    made.leave(first)


async def test_a_route_that_changes_takes_the_waiting_along(fake_clock: clock.FakeClock) -> None:
    old = fleets.make_replica("r1", state=fleet.ReplicaState.STARTING)
    new = fleets.make_replica("r2", version="2")
    made, source = room(fake_clock, fleets.make_view([old, new]))
    waiter = made.enter(ask("a"))
    pinned = made.enter(ask("b", version="1"))
    assert made.waiting("chat")["interactive"] == 2
    source.set(fleets.make_view([old, new], revision=2, weights={"2": 100}))
    made.tick()
    assert await outcome(made, waiter) == "r2"
    assert made.waiting("chat")["interactive"] == 1
    made.leave(pinned)


async def test_a_suspect_is_passed_over_until_it_has_a_new_incarnation(
    fake_clock: clock.FakeClock,
) -> None:
    one = fleets.make_replica("r1")
    made, source = room(fake_clock, fleets.make_view([one]))
    made.suspect(one)
    waiter = made.enter(ask("a"))
    await fake_clock.advance(0.5)
    made.tick()
    assert made.waiting("chat")["interactive"] == 1
    again = dataclasses.replace(one, incarnation=2)
    source.set(fleets.make_view([again], revision=2))
    made.tick()
    assert await outcome(made, waiter) == "r1"
    made.suspect(again)
    other = made.enter(ask("b"))
    await fake_clock.advance(1.1)  # the suspicion lapses: it may have been the network
    made.tick()
    assert await outcome(made, other) == "r1"


async def test_full_is_believed_for_a_moment_and_per_kind(fake_clock: clock.FakeClock) -> None:
    one = fleets.make_replica("r1")
    made, _ = room(fake_clock, fleets.make_view([one]), full_backoff_s=0.05)
    made.full(one, B)
    batch, urgent = made.enter(ask("b", B)), made.enter(ask("i"))
    assert await outcome(made, urgent) == "r1"
    assert made.waiting("chat")["batch"] == 1
    await fake_clock.advance(0.06)
    made.tick()
    assert await outcome(made, batch) == "r1"


async def test_requeued_request_goes_before_those_behind_it(fake_clock: clock.FakeClock) -> None:
    made, _ = room(fake_clock, fleets.make_view([fleets.make_replica("r1", seats=1)]))
    first, second = made.enter(ask("a")), made.enter(ask("b"))
    grant = await made.wait(first)
    made.full(grant.replica, I)
    made.again(first)
    grant.close()
    assert await outcome(made, first) == "r1"
    assert made.waiting("chat")["interactive"] == 1
    made.leave(second)


async def test_the_background_follows_time_and_view(fake_clock: clock.FakeClock) -> None:
    made, source = room(fake_clock, fleets.make_view([]))
    running = asyncio.create_task(made.run())
    waiter = made.enter(ask("a"))
    await fake_clock.advance(0)
    source.set(fleets.make_view([fleets.make_replica("r1")], revision=2))
    assert await outcome(made, waiter) == "r1"
    other = made.enter(ask("b", deadline_us=fake_clock.wall_us() + 60_000, version="1"))
    made.leave(waiter)
    assert await outcome(made, other) == "r1"
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


async def test_the_same_prefix_goes_where_it_went(fake_clock: clock.FakeClock) -> None:
    replicas = [fleets.make_replica(f"r{n}") for n in range(4)]
    made, _ = room(fake_clock, fleets.make_view(replicas), draw=0.6)
    body = harness.chat_body(messages=[{"role": "user", "content": "x" * 2000}])
    took = []
    for name in "abc":
        waiter = made.enter(ask(name, body=body))
        grant = await made.wait(waiter)
        took.append(grant.replica.replica_id)
        grant.close()
        made.leave(waiter)
    assert len(set(took)) == 1
