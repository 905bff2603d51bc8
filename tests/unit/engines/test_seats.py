"""The table of seats, and the gate that moves it."""

import asyncio

import hypothesis
import pytest
from hypothesis import strategies

from engines.replica import gate, seats
from scheduler.contracts import clock, fleet, requests

P, S, B = requests.Tier.INTERACTIVE, requests.Tier.STANDARD, requests.Tier.BATCH
Seated, Wait, FullV = seats.Verdict.SEATED, seats.Verdict.WAIT, seats.Verdict.FULL


def table(total: int = 4, reserved: int = 1, role: fleet.Role = fleet.Role.SHARED) -> seats.Seats:
    return seats.Seats(total, reserved, role)


def test_batch_leaves_the_reserved_seats_alone() -> None:
    t = table(4, 2)
    assert [t.ask(f"b{i}", B).verdict for i in range(3)] == [Seated, Seated, FullV]
    assert t.ask("i", P).verdict is Seated
    assert t.free == 1


def test_role_batch_uses_every_seat_and_role_interactive_none() -> None:
    assert [table(2, 1, fleet.Role.BATCH).ask("b", B, 2).verdict] == [Seated]
    assert table(2, 0, fleet.Role.INTERACTIVE).ask("b", B).verdict is FullV


def test_interactive_evicts_the_youngest_batch_first_and_counts_it() -> None:
    t = table(3, 0)
    for name in ("old", "mid", "young"):
        t.ask(name, B)
    answer = t.ask("i", S)
    assert (answer.verdict, answer.victims) == (Wait, ("young",))
    assert t.ask("i2", P).victims == ("mid",)
    assert t.preempted_total == 2
    assert not t.try_seat("i")
    t.give_back("mid")
    assert not t.try_seat("i2"), "the older claim goes first"
    assert t.try_seat("i")
    t.give_back("young")
    assert t.try_seat("i2")


def test_a_line_that_was_preempted_twice_leaves_only_after_all_others() -> None:
    t = table(4, 0)
    for name, preempted in (("never", 0), ("thrice", 3), ("once", 1), ("twice", 2)):
        t.ask(name, B, preempted=preempted)
    assert [t.ask(f"i{n}", P).victims for n in range(4)] == [
        ("once",),
        ("never",),
        ("twice",),
        ("thrice",),
    ]


def test_shedding_and_many_seats_at_once_spare_pinned_lines_too() -> None:
    t = table(6, 0)
    for name, preempted in (("a", 0), ("pinned", 2), ("b", 0), ("pinned2", 2)):
        t.ask(name, B, preempted=preempted)
    assert t.shed(1) == ("b",)
    assert t.ask("i", P, 4).victims == ("a",), "b is leaving: two seats are free, two come free"
    assert t.ask("i2", P, 1).victims == ("pinned2",)


def test_a_second_claim_does_not_evict_for_seats_that_are_already_coming_free() -> None:
    t = table(2, 0)
    t.ask("two", B, 2)
    assert t.ask("i", P).victims == ("two",)
    second = t.ask("i2", P)
    assert (second.verdict, second.victims) == (Wait, ())


def test_interactive_never_evicts_interactive() -> None:
    t = table(2, 0)
    t.ask("a", P)
    t.ask("b", B)
    assert t.ask("c", P, 2).verdict is FullV
    assert t.preempted_total == 0, "nobody is evicted in vain"


def test_more_sequences_than_seats_take_the_whole_replica() -> None:
    t = table(2, 0)
    assert t.ask("many", P, 99).verdict is Seated
    assert t.free == 0


def test_batch_of_many_choices_sits_once_all_seats_that_batch_may_have_are_free() -> None:
    t = table(4, 1)
    t.ask("b", B)
    assert t.ask("many", B, 4).verdict is FullV
    t.give_back("b")
    assert t.ask("many", B, 4).verdict is Seated
    assert t.free == 1
    assert table(2, 2).ask("b", B).verdict is FullV


def test_draining_refuses_and_turning_interactive_names_all_batch() -> None:
    t = table(4, 0)
    t.ask("b1", B)
    t.ask("b2", B)
    t.ask("i", P)
    assert set(t.set_role(fleet.Role.INTERACTIVE)) == {"b1", "b2"}
    assert t.set_role(fleet.Role.INTERACTIVE) == ()
    t.draining = True
    assert t.ask("x", P).reason == "draining"


def test_the_same_attempt_twice_is_refused() -> None:
    t = table()
    t.ask("a", P)
    with pytest.raises(ValueError, match="a holds a seat already"):
        t.ask("a", P)
    with pytest.raises(ValueError, match="reserved"):
        seats.Seats(2, 3, fleet.Role.SHARED)


async def test_reclaim_is_timed_from_the_order_to_the_free_seat(
    fake_clock: clock.FakeClock,
) -> None:
    door = gate.Gate(table(1, 0), fake_clock)
    victim = await door.enter("b", B)
    asking = asyncio.create_task(door.enter("i", P))
    await victim.must_leave.wait()
    assert victim.why is gate.Leave.PREEMPTED
    await fake_clock.advance(0.2)
    assert not asking.done()
    victim.release()
    victim.release()
    with await asking:
        assert list(door.reclaim_ms) == pytest.approx([200.0])
    assert door.table.free == 1


async def test_a_victim_that_hangs_makes_the_replica_full_and_the_claim_is_dropped(
    fake_clock: clock.FakeClock,
) -> None:
    door = gate.Gate(table(1, 0), fake_clock)
    victim = await door.enter("b", B)
    asking = asyncio.create_task(door.enter("i", P))
    await victim.must_leave.wait()
    await fake_clock.advance(0.1)
    await fake_clock.advance(gate.PATIENCE_S + 0.1)
    with pytest.raises(gate.Full, match="did not leave"):
        await asking
    assert (door.table.interactive, door.table.batch) == (0, 1)


async def test_role_change_returns_once_batch_is_gone(fake_clock: clock.FakeClock) -> None:
    door = gate.Gate(table(2, 0), fake_clock)
    held = await door.enter("b", B)
    change = asyncio.create_task(door.set_role(fleet.Role.INTERACTIVE))
    await held.must_leave.wait()
    assert not change.done()
    held.release()
    assert await change == 1


TIERS = strategies.sampled_from(list(requests.Tier))
STEPS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(["enter", "leave", "cancel", "role", "abandon"]),
        strategies.integers(0, 5),
        TIERS,
        strategies.integers(1, 3),
    ),
    max_size=40,
)


@hypothesis.given(STEPS, strategies.integers(1, 4), strategies.integers(0, 4))
@hypothesis.settings(deadline=None)
def test_every_seat_comes_back_whatever_happens(
    steps: list[tuple[str, int, requests.Tier, int]], total: int, reserved: int
) -> None:
    asyncio.run(_play(steps, total, min(reserved, total)))


async def _play(
    steps: list[tuple[str, int, requests.Tier, int]], total: int, reserved: int
) -> None:
    door = gate.Gate(table(total, reserved), clock.FakeClock())
    tasks: list[asyncio.Task[None]] = []
    leave: list[asyncio.Event] = []

    async def hold(key: str, tier: requests.Tier, need: int, over: asyncio.Event) -> None:
        try:
            seat = await door.enter(key, tier, need)
        except (gate.Full, ValueError):
            return
        with seat:
            seated = door.table.interactive + door.table.batch
            assert seated >= 1
            done = [asyncio.create_task(e.wait()) for e in (over, seat.must_leave)]
            try:
                await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in done:
                    task.cancel()

    for what, number, tier, need in steps:
        if what == "enter":
            leave.append(asyncio.Event())
            tasks.append(asyncio.create_task(hold(f"k{number}", tier, need, leave[-1])))
        elif what == "leave" and leave:
            leave[number % len(leave)].set()
        elif what == "abandon" and tasks:
            tasks[number % len(tasks)].cancel()
        elif what == "cancel":
            door.cancel(f"k{number}")
        elif what == "role":
            role = list(fleet.Role)[number % 3]
            tasks.append(asyncio.create_task(_role(door, role)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert door.table.interactive <= total + sum(s[3] for s in steps)
    for event in leave:
        event.set()
    for _ in range(20):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [r for r in results if isinstance(r, AssertionError)]
    assert (door.table.interactive, door.table.batch, len(door.table)) == (0, 0, 0)


async def _role(door: gate.Gate, role: fleet.Role) -> None:
    await door.set_role(role)
