"""Which team crowds a model, and what it then leaves to others."""

import dataclasses

from scheduler.contracts import ids, requests
from scheduler.core import crowding, load, routing
from tests.unit.scheduler.test_routing import ASK, chosen, replica, situation


def test_a_team_crowds_only_while_others_come() -> None:
    crowd = crowding.Crowd()
    crowd.came("noisy", 0.0)
    for _ in range(10):
        crowd.ran("noisy", 1)
    assert not crowd.crowds("noisy", 1.0)
    crowd.came("quiet", 1.0)
    assert crowd.crowds("noisy", 2.0)
    assert not crowd.crowds("quiet", 2.0)
    assert not crowd.crowds("noisy", 1.0 + crowding.SEEN_S + 0.1)
    crowd.came("noisy", 100.0)  # the other is forgotten
    assert not crowd.crowds("noisy", 100.0)


def test_equal_parts_crowd_nobody() -> None:
    crowd = crowding.Crowd()
    for team in ("a", "b", "c"):
        crowd.came(team, 0.0)
        crowd.ran(team, 1)
    assert not any(crowd.crowds(team, 0.0) for team in ("a", "b", "c"))
    crowd.ran("b", 1)
    assert [team for team in ("a", "b", "c") if crowd.crowds(team, 0.0)] == ["b"]
    crowd.ran("b", -1)
    crowd.ran("b", -1)
    assert not crowd.crowds("b", 0.0)


def test_what_is_left_to_others_is_a_part_of_the_replicas_rounded_down() -> None:
    loads = load.Loads()
    four = [replica(f"r{n}") for n in range(4)]
    known = situation(*four, loads=loads)
    crowd = dataclasses.replace(ASK, left=0.25)
    for name in ("r0", "r1"):
        loads.open("chat", ids.ReplicaId(name), requests.Tier.INTERACTIVE, prefill=9_999)
    assert chosen(crowd, known) in {"r2", "r3"}
    busy = loads.open("chat", ids.ReplicaId("r2"), requests.Tier.INTERACTIVE, prefill=100)
    assert chosen(crowd, known) == "r2"  # behind its own prompt, and not on the last free one
    assert chosen(ASK, known) == "r3"
    busy.close()
    loads.open("chat", ids.ReplicaId("r2"), requests.Tier.INTERACTIVE, prefill=9_999)
    assert chosen(crowd, known) is None
    assert chosen(ASK, known) == "r3"
    few = situation(*four[3:], loads=loads)
    assert routing.choose(crowd, few) is not None


def test_what_is_left_to_others_is_a_part_of_those_that_could_take_the_request() -> None:
    loads = load.Loads()
    eight = [replica(f"r{n}", max_context=32_768 if n < 2 else 2_048) for n in range(8)]
    crowd = dataclasses.replace(ASK, left=0.25)
    known = situation(*eight, loads=loads)
    assert chosen(dataclasses.replace(crowd, long=True), known) in {"r0", "r1"}
    assert chosen(dataclasses.replace(crowd, context_tokens=30_000), known) in {"r0", "r1"}
