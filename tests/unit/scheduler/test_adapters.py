"""Which replica holds which adapters, case by case."""

from collections.abc import Mapping, Sequence

import pytest

from scheduler.contracts import ids, loras
from scheduler.core import adapters

S = loras.AdapterState


def copy(name: str, **changes: object) -> adapters.Copy:
    fields: dict[str, object] = {
        "path": f"/a/{name}", "state": S.LOADED, "uses": 1, "idle_s": 60.0, "since_s": 60.0, **changes
    }  # fmt: skip
    return adapters.Copy(name, **fields)  # type: ignore[arg-type]


def holder(
    name: str, room: int, *copies: adapters.Copy, told: Sequence[str] | None = None
) -> adapters.Holder:
    names = [one.name for one in copies] if told is None else told
    return adapters.Holder(
        ids.ReplicaId(name), room, copies, {each: f"/a/{each}" for each in names}
    )


def wish(name: str, **changes: object) -> adapters.Wish:
    return adapters.Wish(name, f"/a/{name}", **changes)  # type: ignore[arg-type]


def told(found: adapters.Decision) -> Mapping[str, list[str]]:
    return {str(name): sorted(names) for name, names in found.told.items()}


def test_nothing_is_loaded_that_nobody_asks_for() -> None:
    assert told(adapters.decide([holder("r1", 4)], [wish("law")])) == {"r1": []}


def test_what_somebody_waits_for_is_loaded_where_there_is_most_room() -> None:
    found = adapters.decide(
        [holder("r1", 4, copy("tax")), holder("r2", 4)],
        [wish("law", waiting=3, oldest_s=0.1), wish("tax")],
    )
    assert told(found) == {"r1": ["tax"], "r2": ["law"]}
    assert found.changes == (adapters.Change(ids.ReplicaId("r2"), "law", True, "3 wait for it"),)


def test_what_nobody_asks_for_any_more_stays_while_there_is_room() -> None:
    found = adapters.decide([holder("r1", 2, copy("tax"))], [wish("law", waiting=1), wish("tax")])
    assert told(found) == {"r1": ["law", "tax"]}


def test_the_longest_unused_goes_for_who_waits() -> None:
    found = adapters.decide(
        [holder("r1", 2, copy("tax", idle_s=5.0), copy("old", idle_s=50.0))],
        [wish("law", waiting=1), wish("tax"), wish("old")],
    )
    assert told(found) == {"r1": ["law", "tax"]}
    assert [(one.name, one.load, one.reason) for one in found.changes] == [
        ("old", False, "was used least, room for law"),
        ("law", True, "1 wait for it"),
    ]


def test_what_is_dear_to_load_and_much_asked_for_stays() -> None:
    """The cheaper miss goes, though it was used more lately."""
    found = adapters.decide(
        [holder("r1", 2, copy("big", idle_s=50.0), copy("small", idle_s=5.0))],
        [
            wish("law", waiting=1),
            wish("big", share=0.4, cost_s=8.0),
            wish("small", share=0.4, cost_s=0.1),
        ],
    )
    assert "big" in told(found)["r1"]


def test_the_second_copy_of_one_goes_before_the_only_one_of_another() -> None:
    found = adapters.decide(
        [holder("r1", 1, copy("two")), holder("r2", 1, copy("two", idle_s=3.0)),
         holder("r3", 1, copy("one", idle_s=90.0))],
        [wish("law", waiting=1), wish("one"), wish("two")],
    )  # fmt: skip
    assert told(found) == {"r1": ["law"], "r2": ["two"], "r3": ["one"]}


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({"running": 1}, False),
        ({"state": S.LOADING}, False),
        ({"uses": 0, "idle_s": 0.5}, False),
        ({"uses": 0, "idle_s": 9.0}, True),
    ],
)
def test_who_may_go(changes: dict[str, object], goes: bool) -> None:
    found = adapters.decide(
        [holder("r1", 1, copy("tax", **changes))],
        [wish("law", waiting=1, oldest_s=0.5), wish("tax")],
    )
    assert told(found) == {"r1": ["law"] if goes else ["tax"]}
    assert found.notes == (() if goes else ("adapter law: 1 wait, every adapter there is in use",))


def test_two_that_both_have_requests_take_turns() -> None:
    """E5: the second adapter on a base is loaded though the first is always busy."""
    busy = copy("tax", running=1, since_s=5.0)
    wishes = [wish("law", waiting=1, oldest_s=1.0), wish("tax", waiting=4, oldest_s=0.2)]
    assert told(adapters.decide([holder("r1", 1, busy)], wishes)) == {"r1": ["tax"]}
    wishes[0] = wish("law", waiting=1, oldest_s=2.5)
    turned = adapters.decide([holder("r1", 1, busy)], wishes)
    assert told(turned) == {"r1": ["law"]}
    # Its sequences end first: until then nothing moves again.
    leaving = copy("tax", running=1, state=S.LEAVING, since_s=5.0)
    wishes[1] = wish("tax", waiting=4, oldest_s=30.0)
    again = adapters.decide([holder("r1", 1, leaving, told=["law"])], wishes)
    assert (told(again), again.changes) == ({"r1": ["law"]}, ())


def test_copies_follow_the_traffic_into_free_room() -> None:
    holders = [holder(f"r{number}", 2) for number in range(8)]
    found = adapters.decide(
        holders, [wish("hot", share=0.75), wish("warm", share=0.24), wish("cold", share=0.01)]
    )
    count = {
        name: sum(name in names for names in found.told.values())
        for name in ("hot", "warm", "cold")
    }
    assert count == {"hot": 8, "warm": 2, "cold": 1}
    assert max(map(len, found.told.values())) <= 2


def test_of_hundreds_the_most_popular_come_first_and_then_nothing_moves() -> None:
    """400 adapters by Zipf's law on four replicas with room for 16 each, which have none yet."""
    total = sum(1 / (rank + 1) for rank in range(400))
    wishes = [wish(f"a{rank:03}", share=1 / (rank + 1) / total) for rank in range(400)]
    found = adapters.decide([holder(f"r{number}", 16) for number in range(4)], wishes)
    assert [len(names) for names in found.told.values()] == [16] * 4
    held = sorted(name for names in found.told.values() for name in names)
    assert set(held) == {f"a{rank:03}" for rank in range(len(set(held)))}
    assert len(set(held)) >= 60
    loaded = [
        holder(str(name), 16, *(copy(each) for each in names)) for name, names in found.told.items()
    ]
    again = adapters.decide(loaded, wishes)
    assert again.changes == ()
    late = [*wishes[:399], wish("a399", share=wishes[399].share, waiting=1, oldest_s=0.1)]
    moved = {change.name: change.load for change in adapters.decide(loaded, late).changes}
    assert moved.pop("a399") is True
    assert list(moved.values()) == [False], "one goes for who waits, the least popular"
    assert set(moved) <= {f"a{rank:03}" for rank in range(50, 64)}


def test_a_slightly_more_popular_one_takes_nobodys_place() -> None:
    at = [holder("r1", 1, copy("tax"))]
    assert told(adapters.decide(at, [wish("law", share=0.55), wish("tax", share=0.45)])) == {
        "r1": ["tax"]
    }
    assert told(adapters.decide(at, [wish("law", share=0.95), wish("tax", share=0.05)])) == {
        "r1": ["law"]
    }


def test_preloaded_before_anybody_asks() -> None:
    found = adapters.decide([holder("r1", 1), holder("r2", 1)], [wish("law", preload=True)])
    assert sorted(len(names) for names in found.told.values()) == [0, 1]


def test_what_is_declared_no_more_or_elsewhere_goes() -> None:
    at = holder("r1", 3, copy("gone", running=1), copy("moved"))
    found = adapters.decide([at], [adapters.Wish("moved", "/other/place")])
    assert told(found) == {"r1": []}
    assert {one.reason for one in found.changes} == {"is not declared, or does not load"}


def test_what_failed_on_a_replica_is_not_told_to_it_again() -> None:
    failed = copy("law", state=S.FAILED)
    found = adapters.decide(
        [holder("r1", 2, failed), holder("r2", 1, copy("tax", running=1))],
        [wish("law", waiting=1), wish("tax")],
    )
    assert told(found) == {"r1": [], "r2": ["tax"]}


def test_a_new_leader_takes_over_what_is_loaded() -> None:
    at = adapters.Holder(
        ids.ReplicaId("r1"),
        4,
        (copy("law"), copy("bad", state=S.FAILED), copy("out", state=S.LEAVING)),
    )
    found = adapters.decide([at], [wish("law"), wish("bad"), wish("out")])
    assert told(found) == {"r1": ["law"]}


def test_no_replica_that_takes_any_is_said() -> None:
    found = adapters.decide([holder("r1", 0)], [wish("law", waiting=2)])
    assert found.notes == ("adapter law: 2 wait, no replica takes adapters",)


def test_the_most_urgent_is_told_first() -> None:
    found = adapters.decide(
        [holder("r1", 3)],
        [wish("cold", share=0.1), wish("hot", share=0.9), wish("law", waiting=1, oldest_s=2.0)],
    )
    assert list(found.told[ids.ReplicaId("r1")]) == ["law", "hot", "cold"]


def test_what_was_just_used_stays_though_it_loaded_a_little_faster() -> None:
    found = adapters.decide(
        [holder("r1", 2, copy("new", idle_s=0.1), copy("old", idle_s=40.0))],
        [
            wish("law", waiting=1),
            wish("new", share=0.1, cost_s=0.30),
            wish("old", share=0.1, cost_s=0.34),
        ],
    )
    assert told(found) == {"r1": ["law", "new"]}
