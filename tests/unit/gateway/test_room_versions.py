"""A route of two versions: nobody is drawn to one that takes no such request, or waits for one that went."""

import dataclasses

from scheduler.contracts import clock, fleet
from scheduler.core import routing
from tests.unit.gateway import harness
from tests.unit.gateway.test_room_rules import ask, granted, room

HALF = fleet.Route("chat", {"1": 50, "2": 50}, max_context=65536)


def view(revision: int, *replicas: fleet.Replica) -> fleet.FleetView:
    made = harness.make_view(replicas, max_context=65536)
    return dataclasses.replace(made, revision=revision, routes={"chat": HALF})


def next_version(**changes: object) -> fleet.Replica:
    return harness.make_replica("r2", version="2", **changes)


async def test_a_rollout_sends_nobody_to_a_version_that_is_not_up(
    fake_clock: clock.FakeClock,
) -> None:
    """The draw of this room says version 2; with its only replica starting, version 1 answers."""
    made, source = room(fake_clock, harness.make_replica("r1"))
    starting = next_version(state=fleet.ReplicaState.STARTING)
    source.set(view(2, harness.make_replica("r1"), starting))
    early = made.enter(ask("early"))
    assert early.open is not None
    assert early.open.replica.replica_id == "r1"
    source.set(view(3, harness.make_replica("r1"), next_version()))
    late = made.enter(ask("late"))
    assert late.open is not None
    assert late.open.replica.replica_id == "r2"
    for waiter in (early, late):
        made.leave(waiter)
    assert made.loads.idle


async def test_an_adapter_that_the_next_version_lacks_keeps_its_requests(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, harness.make_replica("r1"))
    source.set(view(2, harness.make_replica("r1"), next_version(adapters={})))
    poet = made.enter(ask("p", adapter="poet"))
    assert poet.open is not None
    assert poet.open.replica.replica_id == "r1"
    made.leave(poet)


async def test_who_waits_for_a_version_that_went_is_served_by_the_other(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, harness.make_replica("r1"))
    source.set(view(2, harness.make_replica("r1"), next_version(seats=1)))
    first, second = made.enter(ask("a")), made.enter(ask("b"))
    assert granted([first, second]) == [first]  # version 2 is drawn, and has one seat
    source.set(view(3, harness.make_replica("r1")))
    made.tick()
    assert second.open is not None
    assert second.open.replica.replica_id == "r1"
    for waiter in (first, second):
        made.leave(waiter)
    assert made.loads.idle


async def test_one_teams_hint_says_nothing_of_anothers_replica(fake_clock: clock.FakeClock) -> None:
    replicas = [harness.make_replica(f"r{n}", seats=64) for n in range(8)]
    made, _ = room(fake_clock, *replicas)
    went = {}
    for team in ("physics", "biology", "chemistry", "history"):
        waiter = made.enter(ask(team, team=team, cache_hint="nightly"))
        assert waiter.open is not None
        went[team] = waiter.open.replica.replica_id
        made.leave(waiter)
        again = made.enter(ask(f"{team} again", team=team, cache_hint="nightly"))
        assert again.open is not None
        assert again.open.replica.replica_id == went[team]
        made.leave(again)
    assert len(set(went.values())) > 1


def test_a_version_is_drawn_among_those_that_take_the_request() -> None:
    assert routing.pick_version(HALF, 0.9, lambda version: version == "1") == "1"
    assert routing.pick_version(HALF, 0.1, lambda version: version == "2") == "2"
    assert routing.pick_version(HALF, 0.9, lambda _: False) == "2"  # none: as the route says
