"""The admission queue: order, fairness, bounds, deadlines, places kept, and what an operation costs."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.contracts import requests
from scheduler.core import admission, drain

I, S, B = requests.Tier.INTERACTIVE, requests.Tier.STANDARD, requests.Tier.BATCH  # noqa: E741 - tiers
MIB = 1024 * 1024


def rules(per_band: int = 99, total: int = 999, size: int = MIB, **more: Any) -> admission.Rules:
    bounds = {tier: admission.Bound(per_band, size) for tier in requests.Tier}
    return admission.Rules(bounds, admission.Bound(total, more.pop("total_size", 9 * size)), **more)


def queue(made: admission.Rules | None = None) -> admission.Queue:
    return admission.Queue(made or rules())


def ticket(name: str, tier: requests.Tier = I, **fields: Any) -> admission.Ticket:
    return admission.Ticket(
        name, tier, fields.pop("team", "team"), fields.pop("arrived", 0.0), **fields
    )


def offer(
    waiting: admission.Queue,
    *tickets: admission.Ticket,
    now: float = 0.0,
    rate: float | None = None,
) -> list[admission.Admitted | admission.Refused]:
    return [waiting.offer(one, now=now, drain_per_s=rate) for one in tickets]


def drained(
    waiting: admission.Queue,
    now: float = 0.0,
    place: Callable[[admission.Ticket], object | None] = lambda one: one,
) -> list[str]:
    taken = iter(lambda: waiting.take(place, now), None)
    return [one.request_id for one, _ in taken]


def names(tickets: tuple[admission.Ticket, ...]) -> list[str]:
    return [one.request_id for one in tickets]


def test_bands_first_then_first_come() -> None:
    waiting = queue()
    offer(waiting, ticket("b1", B), ticket("s1", S), ticket("i1"), ticket("b2", B), ticket("i2"))
    assert waiting.waiting() == {"interactive": 2, "standard": 1, "batch": 2}
    assert drained(waiting) == ["i1", "i2", "s1", "b1", "b2"]
    assert len(waiting) == 0
    assert waiting.size == 0


def test_a_closed_band_is_not_asked() -> None:
    waiting = queue()
    offer(waiting, ticket("i1"), ticket("b1", B))
    taken = waiting.take(lambda one: one, 0.0, frozenset({I, S}))
    assert taken is not None
    assert taken[0].request_id == "b1"


def test_a_flood_of_one_team_does_not_hold_up_another() -> None:
    waiting = queue()
    offer(waiting, *[ticket(f"flood{n}", team="a") for n in range(9)])
    offer(waiting, *[ticket(f"other{n}", team="b") for n in range(3)])
    assert drained(waiting)[:7] == [
        "flood0", "other0", "flood1", "other1", "flood2", "other2", "flood3",
    ]  # fmt: skip


def test_turns_are_of_equal_service_not_of_equal_number() -> None:
    waiting = queue()
    offer(waiting, *[ticket(f"big{n}", team="a", cost=300.0) for n in range(4)])
    offer(waiting, *[ticket(f"small{n}", team="b", cost=100.0) for n in range(12)])
    first = drained(waiting)[:8]
    assert sum(name.startswith("small") for name in first) == 6


def test_shares_weigh() -> None:
    waiting = queue(rules(shares={"a": 2.0}))
    offer(waiting, *[ticket(f"{team}{n}", team=team) for n in range(20) for team in "ab"])
    first = drained(waiting)[:12]
    assert sum(name.startswith("a") for name in first) == 8


def test_who_was_idle_has_saved_nothing_and_who_was_busy_owes_nothing() -> None:
    waiting = queue()
    for n in range(50):  # team a is served alone, for a long time
        offer(waiting, ticket(f"alone{n}", team="a"))
        drained(waiting)
    offer(waiting, *[ticket(f"a{n}", team="a") for n in range(10)])
    offer(waiting, *[ticket(f"b{n}", team="b") for n in range(10)])
    first = drained(waiting)[:10]
    assert sum(name.startswith("b") for name in first) == 5


def test_what_a_turn_really_cost_is_settled_afterwards() -> None:
    waiting = queue(rules(credit=200.0))
    dear = ticket("dear", team="a", cost=10.0)
    offer(waiting, dear, ticket("b0", team="b", cost=10.0))
    assert drained(waiting) == ["dear", "b0"]
    waiting.settle(dear, 110.0, 0.0)
    waiting.settle(dear, 110.0, 0.0)
    assert waiting.attained(I, "a", 0.0) == pytest.approx(110.0)
    offer(waiting, *[ticket(f"{team}{n}", team=team, cost=50.0) for n in (1, 2) for team in "ba"])
    assert drained(waiting) == ["b1", "b2", "a1", "a2"]


def test_earliest_deadline_first_inside_a_team() -> None:
    waiting = queue()
    for name, deadline in (("late", 9.0), ("soon", 5.0), ("never", None), ("soon2", 5.0)):
        offer(waiting, ticket(name, deadline=deadline))
    assert drained(waiting) == ["soon", "soon2", "late", "never"]


def test_a_requeued_ticket_keeps_its_place_and_is_not_charged_twice() -> None:
    waiting = queue()
    offer(waiting, ticket("a"), ticket("b"), ticket("c"))
    first, _ = waiting.take(lambda one: True, 0.0) or pytest.fail("nobody waits")
    assert waiting.attained(I, "team", 0.0) == 1.0
    offer(waiting, ticket("d"))
    waiting.requeue(first, 0.0)
    assert waiting.attained(I, "team", 0.0) == 0.0
    oldest = waiting.oldest(I)
    assert oldest is first
    assert drained(waiting) == ["a", "b", "c", "d"]


def test_who_passed_by_an_empty_queue_may_be_requeued_too() -> None:
    waiting = queue()
    quick = ticket("quick")
    waiting.pass_by(quick, 0.0)
    offer(waiting, ticket("x"))
    waiting.requeue(quick, 0.0)
    assert drained(waiting) == ["quick", "x"]


def test_a_ticket_that_was_not_taken_cannot_be_requeued() -> None:
    waiting = queue()
    here = ticket("a")
    offer(waiting, here)
    for wrong in (here, ticket("never")):
        with pytest.raises(ValueError, match="was not taken"):
            waiting.requeue(wrong, 0.0)


def test_a_shape_that_finds_no_room_holds_up_only_its_lane() -> None:
    waiting = queue()
    offer(waiting, *[ticket(f"v2-{n}", shape="v2") for n in range(3)], ticket("v1", shape="v1"))
    asked: list[str] = []

    def place(one: admission.Ticket) -> str | None:
        asked.append(one.request_id)
        return "r1" if one.shape == "v1" else None

    taken = waiting.take(place, 0.0)
    assert taken is not None
    assert taken[0].request_id == "v1"
    assert asked == ["v2-0", "v1"]  # one question a lane
    assert waiting.take(place, 0.0) is None
    assert len(waiting) == 3
    assert drained(waiting) == ["v2-0", "v2-1", "v2-2"]


def test_a_team_that_must_leave_room_holds_up_itself_alone() -> None:
    waiting = queue()
    offer(waiting, *[ticket(f"a{n}", team="a", shape="v1") for n in range(2)])
    offer(waiting, ticket("b0", team="b", shape="v1"), ticket("a2", team="a", shape="v2"))
    asked: list[str] = []

    def place(one: admission.Ticket) -> str | admission.Pass:
        asked.append(one.request_id)
        return admission.Pass.TEAM if one.team == "a" else "r1"

    taken = waiting.take(place, 0.0)
    assert taken is not None
    assert taken[0].request_id == "b0"
    assert sorted(asked) in (["a0", "a2", "b0"], ["a0", "b0"])
    asked.clear()
    assert waiting.take(place, 0.0) is None
    assert sorted(asked) == ["a0", "a2"]
    assert sorted(drained(waiting)) == ["a0", "a1", "a2"]


def test_reshape_moves_tickets_without_moving_their_place() -> None:
    waiting = queue()
    offer(waiting, ticket("a", shape="v2"), ticket("b", shape="v1"), ticket("c", shape="v2"))
    waiting.reshape(lambda one: "v1", 0.0)
    assert waiting.shapes() == {"v1"}
    asked: list[str] = []
    assert waiting.take(lambda one: asked.append(one.request_id), 0.0) is None
    assert asked == ["a"]
    assert drained(waiting) == ["a", "b", "c"]


def test_a_shape_that_nothing_will_ever_take_is_dropped() -> None:
    waiting = queue()
    offer(waiting, ticket("a", shape="v1"), ticket("b", B, shape="v1"), ticket("c", shape="v2"))
    assert names(waiting.drop("v1", B)) == ["b"]
    assert names(waiting.drop("v1")) == ["a"]
    assert drained(waiting) == ["c"]


def test_each_band_is_bounded_and_batch_is_shed_first() -> None:
    waiting = queue(rules(2, 4))
    good = offer(waiting, ticket("b1", B), ticket("b2", B))
    assert all(isinstance(answer, admission.Admitted) for answer in good)
    (full,) = offer(waiting, ticket("b3", B), rate=0.1)
    assert full == admission.Refused(admission.Reason.QUEUE_FULL, 10.0)
    offer(waiting, ticket("s1", S), ticket("s2", S))
    (made_room,) = offer(waiting, ticket("i1"))
    assert isinstance(made_room, admission.Admitted)
    assert names(made_room.shed) == ["b2"]  # the youngest
    offer(waiting, ticket("i2"))
    (refused,) = offer(waiting, ticket("i3"))
    assert isinstance(refused, admission.Refused)
    assert drained(waiting) == ["i1", "i2", "s1", "s2"]


def test_standard_gives_way_to_interactive_where_no_batch_is_left() -> None:
    waiting = queue(rules(9, 2))
    offer(waiting, ticket("s1", S), ticket("s2", S))
    (answer,) = offer(waiting, ticket("i1"))
    assert isinstance(answer, admission.Admitted)
    assert names(answer.shed) == ["s2"]
    (answer,) = offer(waiting, ticket("s3", S))
    assert isinstance(answer, admission.Refused)


def test_who_floods_a_full_band_gives_way_to_who_does_not() -> None:
    waiting = queue(rules(4))
    offer(waiting, *[ticket(f"a{n}", team="a") for n in range(4)])
    (answer,) = offer(waiting, ticket("a4", team="a"))
    assert isinstance(answer, admission.Refused)
    shed = []
    for n in range(3):
        (answer,) = offer(waiting, ticket(f"b{n}", team="b"))
        shed.append(names(answer.shed) if isinstance(answer, admission.Admitted) else "refused")
    assert shed == [["a3"], ["a2"], "refused"]  # two each: nobody holds more than the other


def test_bytes_are_bounded_as_well() -> None:
    waiting = queue(rules(size=100, total_size=150))
    assert isinstance(offer(waiting, ticket("huge", size=101))[0], admission.Refused)
    offer(waiting, ticket("b", B, size=90), ticket("i", size=60))
    assert waiting.size == 150
    (answer,) = offer(waiting, ticket("j", size=40))
    assert isinstance(answer, admission.Admitted)
    assert names(answer.shed) == ["b"]
    assert waiting.size == 100
    (answer,) = offer(waiting, ticket("k", size=1))
    assert isinstance(answer, admission.Refused)
    assert drained(waiting) == ["i", "j"]
    assert waiting.size == 0


def test_deadlines_refuse_and_expire() -> None:
    waiting = queue()
    (late,) = offer(waiting, ticket("late", deadline=5.0), now=5.0)
    assert isinstance(late, admission.Refused)
    assert late.reason is admission.Reason.EXPIRED
    for name, at in (("c", 9.0), ("a", 6.0), ("b", 7.0)):
        offer(waiting, ticket(name, deadline=at))
    offer(waiting, ticket("ever"))
    assert waiting.expire(5.9) == ()
    assert names(waiting.expire(7.0)) == ["a", "b"]
    assert names(waiting.expire(99.0)) == ["c"]
    assert "ever" in waiting


def test_a_deadline_that_cannot_be_met_is_refused_now() -> None:
    waiting = queue()
    offer(waiting, *[ticket(str(n)) for n in range(9)])
    (answer,) = offer(waiting, ticket("x", deadline=4.0), rate=2.0)  # the tenth leaves at 5 s
    assert answer == admission.Refused(admission.Reason.UNMEETABLE, 1.0)
    (answer,) = offer(waiting, ticket("y", deadline=6.0), rate=2.0)
    assert isinstance(answer, admission.Admitted)
    (answer,) = offer(waiting, ticket("z", deadline=0.5))  # nothing measured: let it try
    assert isinstance(answer, admission.Admitted)


def test_a_flood_does_not_make_the_deadline_of_another_team_unmeetable() -> None:
    waiting = queue()
    offer(waiting, *[ticket(str(n), team="a") for n in range(90)])
    (answer,) = offer(waiting, ticket("x", team="b", deadline=1.5), rate=2.0)  # second in turn
    assert isinstance(answer, admission.Admitted)
    (answer,) = offer(waiting, ticket("y", team="b", deadline=1.5), rate=2.0)  # fourth
    assert answer == admission.Refused(admission.Reason.UNMEETABLE, 1.0)


def test_standard_ages_into_turns_of_its_own() -> None:
    waiting = queue(rules(age_s=10.0, age_turns=4))
    offer(waiting, *[ticket(f"s{n}", S) for n in range(3)])
    offer(waiting, *[ticket(f"i{n}") for n in range(20)])

    def next_eight(now: float) -> str:
        taken = [waiting.take(lambda one: one, now) for _ in range(8)]
        return "".join(found[0].request_id[0] for found in taken if found)

    assert next_eight(9.0) == "iiiiiiii"
    assert next_eight(10.0) == "siiisiii"


def test_batch_never_ages() -> None:
    waiting = queue(rules(age_s=0.0, age_turns=2))
    offer(waiting, ticket("b", B), *[ticket(f"i{n}") for n in range(5)])
    assert drained(waiting, now=1e6)[-1] == "b"


def test_who_leaves_is_forgotten_everywhere() -> None:
    waiting = queue()
    offer(waiting, ticket("a", deadline=1.0, shape="x"), ticket("b", shape="x"))
    removed = waiting.remove("a")
    assert removed is not None
    assert removed.request_id == "a"
    assert waiting.remove("a") is None
    assert waiting.expire(9.0) == ()
    oldest = waiting.oldest(I)
    assert oldest is not None
    assert oldest.request_id == "b"
    assert drained(waiting) == ["b"]


def test_drain_rate_counts_only_while_somebody_waits() -> None:
    rate = drain.DrainRate(window_s=10.0, least=3)
    for second in range(5):
        rate.departed(float(second), others_wait=False)
    assert rate.per_s(5.0) is None
    for second in range(4):
        rate.departed(second / 2, others_wait=True)
    assert rate.per_s(2.0) == 2.0
    assert rate.per_s(4.0) == 1.0  # it has stalled since
    assert rate.per_s(11.1) is None  # too old to believe


@pytest.mark.parametrize(
    ("places", "rate", "seconds"), [(1, None, 1), (1, 10.0, 1), (10, 2.0, 5), (999, 0.1, 60)]
)
def test_retry_after(places: int, rate: float | None, seconds: float) -> None:
    assert drain.retry_after_s(places, rate) == seconds


class Counted:
    """A deadline that counts how often it is compared."""

    __slots__ = ("value",)
    comparisons = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return self.value == (other.value if isinstance(other, Counted) else other)

    def __lt__(self, other: Any) -> bool:
        Counted.comparisons += 1
        return self.value < (other.value if isinstance(other, Counted) else other)

    def __le__(self, other: float) -> bool:
        return self.value <= other

    def __hash__(self) -> int:
        return hash(self.value)


def comparisons_each(count: int) -> dict[str, float]:
    """Return the comparisons of deadlines that one operation takes with ``count`` waiting."""
    draw = random.Random(7)
    bounds = {tier: admission.Bound(10**6, 10**9) for tier in requests.Tier}
    waiting = admission.Queue(admission.Rules(bounds, admission.Bound(10**6, 10**9)))
    each: dict[str, float] = {}

    def fresh(n: int) -> admission.Ticket:
        deadline: Any = Counted(1 + draw.random())
        return ticket(str(n), team=str(draw.randrange(100)), shape=n % 3, deadline=deadline)

    def counted(act: str, done: int) -> None:
        each[act] = Counted.comparisons / done
        Counted.comparisons = 0

    for n in range(count):
        waiting.offer(fresh(n), now=0.0, drain_per_s=None)
    Counted.comparisons = 0
    for n in range(200):
        waiting.offer(fresh(count + n), now=0.0, drain_per_s=None)
    counted("offer", 200)
    for _ in range(200):
        assert waiting.take(lambda one: one, 0.0)
    counted("take", 200)
    counted(
        "remove", sum(waiting.remove(str(n)) is not None for n in draw.sample(range(count), 200))
    )
    gone, limit = 0, 1.0
    while gone < 200:
        limit += 10.0 / count
        gone += len(waiting.expire(limit))
    counted("expire", gone)
    return each


@pytest.mark.parametrize("waiting", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_far_longer_queue_costs_a_few_comparisons_more(waiting: int) -> None:
    """1,000 against many more: a tree has 5 to 7 levels more, a scan would take all of them."""
    small, large = comparisons_each(1_000), comparisons_each(waiting)
    for act, comparisons in large.items():
        assert comparisons <= small[act] * 3 + 30, (act, small, large)
