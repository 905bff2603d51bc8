"""A route of two versions: nobody is drawn to one that takes no such request, or waits for one that went."""

import dataclasses

from gateway import threads
from scheduler.contracts import clock, fleet, ids, requests
from tests.unit.gateway import fleets
from tests.unit.gateway.test_room_rules import ask, granted, room

HALF = fleet.Route("chat", {"1": 50, "2": 50}, max_context=65536)


def view(revision: int, *replicas: fleet.Replica) -> fleet.FleetView:
    made = fleets.make_view(replicas, max_context=65536)
    return dataclasses.replace(made, revision=revision, routes={"chat": HALF})


def next_version(**changes: object) -> fleet.Replica:
    return fleets.make_replica("r2", version="2", **changes)


async def test_a_rollout_sends_nobody_to_a_version_that_is_not_up(
    fake_clock: clock.FakeClock,
) -> None:
    """The draw of this room says version 2; with its only replica starting, version 1 answers."""
    made, source = room(fake_clock, fleets.make_replica("r1"))
    starting = next_version(state=fleet.ReplicaState.STARTING)
    source.set(view(2, fleets.make_replica("r1"), starting))
    early = made.enter(ask("early"))
    assert early.open is not None
    assert early.open.replica.replica_id == "r1"
    source.set(view(3, fleets.make_replica("r1"), next_version()))
    late = made.enter(ask("late"))
    assert late.open is not None
    assert late.open.replica.replica_id == "r2"
    for waiter in (early, late):
        made.leave(waiter)
    assert made.loads.idle


async def test_an_adapter_that_the_next_version_lacks_keeps_its_requests(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, fleets.make_replica("r1"))
    source.set(view(2, fleets.make_replica("r1"), next_version(adapters={})))
    poet = made.enter(ask("p", adapter="poet"))
    assert poet.open is not None
    assert poet.open.replica.replica_id == "r1"
    made.leave(poet)


async def test_who_waits_for_a_version_that_went_is_served_by_the_other(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, fleets.make_replica("r1"))
    source.set(view(2, fleets.make_replica("r1"), next_version(seats=1)))
    first, second = made.enter(ask("a")), made.enter(ask("b"))
    assert granted([first, second]) == [first]  # version 2 is drawn, and has one seat
    source.set(view(3, fleets.make_replica("r1")))
    made.tick()
    assert second.open is not None
    assert second.open.replica.replica_id == "r1"
    for waiter in (first, second):
        made.leave(waiter)
    assert made.loads.idle


async def test_one_teams_hint_says_nothing_of_anothers_replica(fake_clock: clock.FakeClock) -> None:
    replicas = [fleets.make_replica(f"r{n}", seats=64) for n in range(8)]
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


async def test_a_request_that_one_version_failed_on_goes_to_the_other(
    fake_clock: clock.FakeClock,
) -> None:
    made, source = room(fake_clock, fleets.make_replica("r1"))
    source.set(view(2, fleets.make_replica("r1"), next_version()))
    asked = made.enter(ask("a"))
    assert asked.open is not None
    assert asked.open.replica.replica_id == "r2"
    asked.open.close()
    made.again(asked, None, "r2")
    assert asked.open is not None
    assert asked.open.replica.replica_id == "r1"
    made.leave(asked)


def asking_for(body: dict[str, object], hint: str | None = None) -> int:
    caller = requests.Caller("physics", "ada", "k1")
    return threads.key(
        requests.InferenceRequest(
            request_id=ids.RequestId("r"),
            endpoint=requests.Endpoint.CHAT,
            body=body,
            model="chat",
            tier=requests.Tier.INTERACTIVE,
            caller=caller,
            stream=False,
            arrived_us=0,
            cache_hint=hint,
        )
    )


def test_a_conversation_keeps_its_key_as_it_grows_and_a_system_prompt_makes_none() -> None:
    system = {"role": "system", "content": "You are kind."}
    hello, reply = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
    first = asking_for({"messages": [system, hello]})
    assert first == asking_for({"messages": [system, hello, reply, hello]})
    assert first != asking_for({"messages": [system, {"role": "user", "content": "bye"}]})
    assert asking_for({"prompt": "x" * 300}) == asking_for({"prompt": "x" * 400})
    assert asking_for({"prompt": [1, 2, 3]}) != asking_for({"prompt": [1, 2, 4]})
    assert asking_for({"messages": [hello]}, "k") == asking_for({"messages": [system]}, "k")
    assert asking_for({}) == 0
