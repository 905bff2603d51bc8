"""What a gateway tells of versions where long prompts have one of their own."""

import dataclasses

from scheduler.contracts import clock, fleet, observed
from tests.unit.gateway import fleets
from tests.unit.gateway.test_room_rules import B, S, ask, room

REPLICAS = (
    fleets.make_replica("r1", seats=2),
    fleets.make_replica("r2", version="long", seats=1),
)
POOLED = fleet.Route(
    "chat", {"1": 100}, max_context=65536, pools=(fleet.Pool(100, "long", 65536),),
    base_context=65536,
)  # fmt: skip


async def test_each_version_has_what_waits_and_runs_and_came(fake_clock: clock.FakeClock) -> None:
    made, source = room(fake_clock, *REPLICAS)
    view = fleets.make_view(REPLICAS, max_context=65536)
    source.set(dataclasses.replace(view, revision=2, routes={"chat": POOLED}))
    short = made.enter(ask("short"))
    kept = [made.enter(ask(f"long-{n}", prompt_tokens=500)) for n in range(3)]
    made.enter(ask("line", B, prompt_tokens=500))
    await fake_clock.advance(0.5)
    made.enter(ask("standard", S, prompt_tokens=500))
    (told,) = [each for each in made.demand() if each.model == "chat"]
    assert told.versions == {
        "1": observed.VersionDemand(0, 1, 0.0, 1),
        "long": observed.VersionDemand(3, 1, 0.5, 4),
    }
    assert (told.arrived, told.arrived_standard) == (5, 1)  # batch is no reason for more replicas
    for waiter in (short, *kept):
        made.leave(waiter)
    made.tick()
    (told,) = [each for each in made.demand() if each.model == "chat"]
    assert told.versions["1"] == observed.VersionDemand(0, 0, 0.0, 1)
    assert told.versions["long"].in_flight == 1  # the standard one had its turn


async def test_nothing_is_told_where_no_route_has_pools(fake_clock: clock.FakeClock) -> None:
    made, _ = room(fake_clock, *REPLICAS)
    made.enter(ask("short"))
    assert [each.versions for each in made.demand()] == [{}]
