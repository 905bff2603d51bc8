"""Adapters on replicas, whatever comes: never too many, no busy one taken away, and everybody has a turn."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from scheduler.contracts import ids, loras
from scheduler.core import adapters

S = loras.AdapterState
NAMES = [f"a{number}" for number in range(8)]


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[adapters.Holder], list[adapters.Wish]]:
    holders: list[adapters.Holder] = []
    for number in range(draw(st.integers(1, 4))):
        room = draw(st.integers(0, 4))
        names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=room))
        copies = tuple(
            adapters.Copy(
                name,
                f"/a/{name}",
                draw(st.sampled_from(S)),
                running=draw(st.sampled_from((0, 0, 1, 3))),
                uses=draw(st.integers(0, 2)),
                idle_s=draw(st.floats(0, 100)),
                since_s=draw(st.floats(0, 100)),
            )
            for name in names
        )
        more = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=room - len(names)))
        told = {name: f"/a/{name}" for name in dict.fromkeys([*names, *more])}
        given_told = draw(st.sampled_from((told, None)))
        holders.append(adapters.Holder(ids.ReplicaId(f"r{number}"), room, copies, given_told))
    wishes = [
        adapters.Wish(
            name,
            f"/a/{name}",
            share=draw(st.sampled_from((0.0, 0.01, 0.2, 0.7))),
            waiting=draw(st.sampled_from((0, 0, 1, 9))),
            oldest_s=draw(st.floats(0, 10)),
            preload=draw(st.booleans()),
            cost_s=draw(st.sampled_from((0.1, 1.0, 9.0))),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    return holders, wishes


@given(pools())
def test_room_and_declarations_hold(
    pool: tuple[list[adapters.Holder], list[adapters.Wish]],
) -> None:
    holders, wishes = pool
    found = adapters.decide(holders, wishes)
    declared = {wish.name: wish.path for wish in wishes}
    assert set(found.told) == {holder.replica_id for holder in holders}
    for holder in holders:
        told = found.told[holder.replica_id]
        assert len(told) <= holder.room
        assert told.items() <= declared.items()
        failed = {copy.name for copy in holder.copies if copy.state is S.FAILED}
        assert not failed & told.keys()


@given(pools())
def test_a_busy_copy_goes_for_a_turn_alone(
    pool: tuple[list[adapters.Holder], list[adapters.Wish]],
) -> None:
    holders, wishes = pool
    policy = adapters.Policy()
    found = adapters.decide(holders, wishes, policy)
    by_name = {wish.name: wish for wish in wishes}
    late = {wish.name for wish in wishes if wish.waiting and wish.oldest_s >= policy.turn_s}
    for change in found.changes:
        holder = next(one for one in holders if one.replica_id == change.replica_id)
        copies = {copy.name: copy for copy in holder.copies}
        copy = copies.get(change.name)
        if change.load or copy is None or change.name not in by_name or copy.state is S.FAILED:
            continue
        if copy.running:
            assert change.reason.startswith("had its turn")
            assert copy.since_s >= policy.turn_s
            assert late & found.told[change.replica_id].keys()


@given(pools())
def test_deciding_again_changes_nothing(
    pool: tuple[list[adapters.Holder], list[adapters.Wish]],
) -> None:
    holders, wishes = pool
    found = adapters.decide(holders, wishes)
    told = [dataclasses.replace(holder, told=found.told[holder.replica_id]) for holder in holders]
    again = adapters.decide(told, wishes)
    assert again.told == found.told
    assert again.changes == ()
    assert adapters.decide(list(reversed(holders)), list(reversed(wishes))).told == found.told


@given(pools())
def test_who_waits_and_has_no_copy_is_said_or_served(
    pool: tuple[list[adapters.Holder], list[adapters.Wish]],
) -> None:
    holders, wishes = pool
    found = adapters.decide(holders, wishes)
    held = {name for told in found.told.values() for name in told}
    for wish in wishes:
        if wish.waiting and wish.name not in held:
            assert any(note.startswith(f"adapter {wish.name}:") for note in found.notes)


@given(st.integers(1, 3), st.integers(2, 8))
def test_everybodys_turn_comes(room: int, count: int) -> None:
    """Every adapter is asked for all the time and one replica holds fewer: each is loaded again and again."""
    held: dict[str, float] = {}
    waits = dict.fromkeys(NAMES[:count], 0.0)
    served: dict[str, int] = dict.fromkeys(waits, 0)
    for step in range(count * 40):
        now = step * 0.25
        copies = tuple(
            adapters.Copy(name, f"/a/{name}", S.LOADED, running=1, uses=1, since_s=now - since)
            for name, since in held.items()
        )
        holder = adapters.Holder(
            ids.ReplicaId("r"), room, copies, {name: f"/a/{name}" for name in held}
        )
        wishes = [
            adapters.Wish(name, f"/a/{name}", waiting=1, oldest_s=waits[name]) for name in waits
        ]
        told = adapters.decide([holder], wishes).told[ids.ReplicaId("r")]
        held = {name: held.get(name, now) for name in told}
        for name in waits:
            waits[name] = 0.0 if name in held else waits[name] + 0.25
            served[name] += name in held
    assert min(served.values()) >= 8
