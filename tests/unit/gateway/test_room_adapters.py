"""A request for an adapter waits for it, goes where it is loaded, and is told what it can't have."""

import dataclasses

import pytest

from scheduler.contracts import clock, errors, fleet, loras, observed, requests
from tests.unit.gateway import fleets
from tests.unit.gateway.test_room_rules import ask, room

S = loras.AdapterState
I = requests.Tier.INTERACTIVE  # noqa: E741


def replica(name: str, *held: tuple[str, loras.AdapterState], **changes: object) -> fleet.Replica:
    """Return a replica that takes adapters at run time, with some."""
    made = fleets.make_replica(name, adapters={}, adapter_slots=2, **changes)
    copies = tuple(
        loras.HeldAdapter(one, f"/a/{one}", state, load_ms=2_400.0) for one, state in held
    )
    return dataclasses.replace(made, adapters=copies, adapter_room=2)


def view(
    revision: int, *replicas: fleet.Replica, faults: dict[str, str] | None = None
) -> fleet.FleetView:
    return fleets.make_view(
        replicas, revision, adapters=("poet", "law"), adapter_faults=faults or {}
    )


async def test_it_waits_until_a_replica_has_it_and_the_broker_hears_of_it(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, replica("r1"), replica("r2"))
    source.set(view(2, replica("r1"), replica("r2", ("poet", S.LOADING))))
    poet = made.enter(ask("p", adapter="poet"))
    base = made.enter(ask("b"))
    assert (poet.open, base.open is not None) == (None, True)
    await fake_clock.advance(0.5)
    (demand,) = made.demand()
    assert demand.adapters == {"poet": observed.AdapterDemand(1, 0.5, 1)}
    source.set(view(3, replica("r1"), replica("r2", ("poet", S.LOADED))))
    made.tick()
    assert poet.open is not None
    assert poet.open.replica.replica_id == "r2"
    (demand,) = made.demand()
    assert demand.adapters == {"poet": observed.AdapterDemand(0, 0.0, 1)}
    for waiter in (poet, base):
        made.leave(waiter)
    assert made.loads.idle


async def test_the_broker_hears_at_once_of_what_no_replica_has_and_of_nothing_else(
    fake_clock: clock.FakeClock,
) -> None:
    """Under load each report looks at all who wait: it must not be made for each that comes."""
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1", ("poet", S.LOADED), seats=1, reserved_seats=0)))
    first, second = made.enter(ask("1", adapter="poet")), made.enter(ask("2", adapter="poet"))
    assert (first.dispatched, second.dispatched) == (True, False)
    assert not made.hurry.is_set()
    law = made.enter(ask("law", adapter="law"))
    assert made.hurry.is_set()
    for waiter in (first, second, law):
        made.leave(waiter)


async def test_a_copy_makes_no_adapter_more_popular(fake_clock: clock.FakeClock) -> None:
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1", ("poet", S.LOADED))))
    poet = made.enter(ask("p", adapter="poet"))
    copy = made.enter(ask("c", tier=requests.Tier.BATCH, adapter="poet", spare=True))
    assert copy.dispatched
    (demand,) = made.demand()
    assert demand.adapters == {"poet": observed.AdapterDemand(0, 0.0, 1)}
    for waiter in (poet, copy):
        made.leave(waiter)


@pytest.mark.parametrize("state", [S.LEAVING, S.FAILED, S.LOADING])
async def test_it_goes_to_none_that_only_had_it_or_will(
    fake_clock: clock.FakeClock, state: loras.AdapterState
) -> None:
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1", ("poet", state))))
    poet = made.enter(ask("p", adapter="poet"))
    assert poet.open is None
    made.leave(poet)


async def test_one_that_goes_on_goes_where_the_adapter_is(fake_clock: clock.FakeClock) -> None:
    """A resumed stream: the replica that it ran on is lost."""
    made, source = room(fake_clock, replica("r1"))
    everywhere = [replica(f"r{n}", ("law", S.LOADED)) for n in range(2, 9)]
    source.set(view(2, replica("r1", ("poet", S.LOADED)), *everywhere))
    poet = made.enter(ask("p", adapter="poet"))
    assert poet.open is not None
    poet.open.close()
    source.set(view(3, *everywhere))
    made.tick()
    made.again(poet, "1")
    assert not poet.dispatched, "no replica without it takes it over"
    (demand,) = made.demand()
    assert demand.adapters["poet"].waiting == 1
    source.set(view(4, replica("r9", ("poet", S.LOADED)), *everywhere))
    made.tick()
    assert poet.open is not None
    assert poet.open.replica.replica_id == "r9"
    made.leave(poet)


async def test_a_wait_in_vain_ends_with_an_honest_retry_after(fake_clock: clock.FakeClock) -> None:
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1", ("law", S.LOADED))))
    poet = made.enter(ask("p", adapter="poet", deadline_us=fake_clock.wall_us() + 1_000_000))
    await fake_clock.advance(1.1)
    made.tick()
    with pytest.raises(errors.Expired, match="adapter poet was not loaded before") as told:
        await made.wait(poet)
    assert told.value.retry_after_s == 3.0  # loads take 2.4 s here
    made.leave(poet)


async def test_what_no_replica_can_serve_is_told_at_once_and_to_those_who_wait(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1")))
    early = made.enter(ask("early", adapter="poet"))
    source.set(view(3, replica("r1"), faults={"poet": "it does not load: of another rank"}))
    made.tick()
    with pytest.raises(errors.NoReplica, match="it does not load: of another rank"):
        await made.wait(early)
    with pytest.raises(errors.NoReplica, match="adapter poet can't be served now"):
        made.enter(ask("late", adapter="poet"))
    law = made.enter(ask("law", adapter="law"))
    for waiter in (early, law):
        made.leave(waiter)


async def test_who_waits_for_one_that_is_taken_away_is_told_soon(
    fake_clock: clock.FakeClock,
) -> None:
    """Nobody would ever load it: a request waited out its deadline, a batch line's being an hour."""
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1")))
    poet, law = made.enter(ask("p", adapter="poet")), made.enter(ask("l", adapter="law"))
    source.set(fleets.make_view((replica("r1"),), 3, adapters=("law",)))
    made.tick()
    assert poet.open is None
    await fake_clock.advance(1.0)
    made.tick()
    source.set(view(4, replica("r1")))  # a view of the moment before: it is there
    made.tick()
    source.set(fleets.make_view((replica("r1"),), 5, adapters=("law",)))
    await fake_clock.advance(1.5)
    made.tick()
    await fake_clock.advance(2.0)
    made.tick()
    with pytest.raises(
        errors.NoReplica, match="adapter poet can't be served now: it is declared no"
    ):
        await made.wait(poet)
    for waiter in (poet, law):
        made.leave(waiter)
    assert made.loads.idle


async def test_one_that_a_replica_lost_keeps_nobody_else_from_there(
    fake_clock: clock.FakeClock,
) -> None:
    """The view is of a moment ago: the adapter has gone since, and the seats have not."""
    made, source = room(fake_clock, replica("r1"))
    source.set(view(2, replica("r1", ("poet", S.LOADED), ("law", S.LOADED))))
    poet = made.enter(ask("p", adapter="poet"))
    assert poet.open is not None
    poet.open.close()
    made.full(replica("r1"), I, "poet")
    made.again(poet)
    base, law = made.enter(ask("b")), made.enter(ask("l", adapter="law"))
    assert (poet.dispatched, base.dispatched, law.dispatched) == (False, True, True)
    await fake_clock.advance(0.06)
    made.tick()
    assert poet.open is not None, "it may have come back"
    for waiter in (poet, base, law):
        made.leave(waiter)
