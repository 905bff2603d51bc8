"""The admission queue: order, fairness, places kept, bounds, deadlines."""

import pytest

from scheduler.core import admission, drain
from tests.unit.scheduler import queues


def test_bands_first_then_first_come() -> None:
    waiting = queues.queue()
    queues.offer(
        waiting,
        queues.ticket("b1", queues.B),
        queues.ticket("s1", queues.S),
        queues.ticket("i1"),
        queues.ticket("b2", queues.B),
        queues.ticket("i2"),
    )
    assert waiting.waiting() == {"interactive": 2, "standard": 1, "batch": 2}
    assert queues.drained(waiting) == ["i1", "i2", "s1", "b1", "b2"]
    assert len(waiting) == 0
    assert waiting.size == 0


def test_a_closed_band_is_not_asked() -> None:
    waiting = queues.queue()
    queues.offer(waiting, queues.ticket("i1"), queues.ticket("b1", queues.B))
    taken = waiting.take(lambda one: one, 0.0, frozenset({queues.I, queues.S}))
    assert taken is not None
    assert taken[0].request_id == "b1"


def test_a_flood_of_one_team_does_not_hold_up_another() -> None:
    waiting = queues.queue()
    queues.offer(waiting, *[queues.ticket(f"flood{n}", team="a") for n in range(9)])
    queues.offer(waiting, *[queues.ticket(f"other{n}", team="b") for n in range(3)])
    assert queues.drained(waiting)[:7] == [
        "flood0", "other0", "flood1", "other1", "flood2", "other2", "flood3",
    ]  # fmt: skip


def test_turns_are_of_equal_service_not_of_equal_number() -> None:
    waiting = queues.queue()
    queues.offer(waiting, *[queues.ticket(f"big{n}", team="a", cost=300.0) for n in range(4)])
    queues.offer(waiting, *[queues.ticket(f"small{n}", team="b", cost=100.0) for n in range(12)])
    first = queues.drained(waiting)[:8]
    assert sum(name.startswith("small") for name in first) == 6


def test_shares_weigh() -> None:
    waiting = queues.queue(queues.rules(shares={"a": 2.0}))
    queues.offer(
        waiting, *[queues.ticket(f"{team}{n}", team=team) for n in range(20) for team in "ab"]
    )
    first = queues.drained(waiting)[:12]
    assert sum(name.startswith("a") for name in first) == 8


def test_who_was_idle_has_saved_nothing_and_who_was_busy_owes_nothing() -> None:
    waiting = queues.queue()
    for n in range(50):  # team a is served alone, for a long time
        queues.offer(waiting, queues.ticket(f"alone{n}", team="a"))
        queues.drained(waiting)
    queues.offer(waiting, *[queues.ticket(f"a{n}", team="a") for n in range(10)])
    queues.offer(waiting, *[queues.ticket(f"b{n}", team="b") for n in range(10)])
    first = queues.drained(waiting)[:10]
    assert sum(name.startswith("b") for name in first) == 5


def test_what_a_turn_really_cost_is_settled_afterwards() -> None:
    waiting = queues.queue(queues.rules(credit=200.0))
    dear = queues.ticket("dear", team="a", cost=10.0)
    queues.offer(waiting, dear, queues.ticket("b0", team="b", cost=10.0))
    assert queues.drained(waiting) == ["dear", "b0"]
    waiting.settle(dear, 110.0, 0.0)
    waiting.settle(dear, 110.0, 0.0)
    assert waiting.attained(queues.I, "a", 0.0) == pytest.approx(110.0)
    queues.offer(
        waiting,
        *[queues.ticket(f"{team}{n}", team=team, cost=50.0) for n in (1, 2) for team in "ba"],
    )
    assert queues.drained(waiting) == ["b1", "b2", "a1", "a2"]


def test_earliest_deadline_first_inside_a_team() -> None:
    waiting = queues.queue()
    for name, deadline in (("late", 9.0), ("soon", 5.0), ("never", None), ("soon2", 5.0)):
        queues.offer(waiting, queues.ticket(name, deadline=deadline))
    assert queues.drained(waiting) == ["soon", "soon2", "late", "never"]


def test_a_requeued_ticket_keeps_its_place_and_is_not_charged_twice() -> None:
    waiting = queues.queue()
    queues.offer(waiting, queues.ticket("a"), queues.ticket("b"), queues.ticket("c"))
    first, _ = waiting.take(lambda one: True, 0.0) or pytest.fail("nobody waits")
    assert waiting.attained(queues.I, "team", 0.0) == 1.0
    queues.offer(waiting, queues.ticket("d"))
    waiting.requeue(first, 0.0)
    assert waiting.attained(queues.I, "team", 0.0) == 0.0
    oldest = waiting.oldest(queues.I)
    assert oldest is first
    assert queues.drained(waiting) == ["a", "b", "c", "d"]


def test_who_passed_by_an_empty_queue_may_be_requeued_too() -> None:
    waiting = queues.queue()
    quick = queues.ticket("quick")
    waiting.pass_by(quick, 0.0)
    queues.offer(waiting, queues.ticket("x"))
    waiting.requeue(quick, 0.0)
    assert queues.drained(waiting) == ["quick", "x"]


def test_a_ticket_that_was_not_taken_cannot_be_requeued() -> None:
    waiting = queues.queue()
    here = queues.ticket("a")
    queues.offer(waiting, here)
    for wrong in (here, queues.ticket("never")):
        with pytest.raises(ValueError, match="was not taken"):
            waiting.requeue(wrong, 0.0)


def test_a_shape_that_finds_no_room_holds_up_only_its_lane() -> None:
    waiting = queues.queue()
    queues.offer(
        waiting,
        *[queues.ticket(f"v2-{n}", shape="v2") for n in range(3)],
        queues.ticket("v1", shape="v1"),
    )
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
    assert queues.drained(waiting) == ["v2-0", "v2-1", "v2-2"]


def test_a_team_that_must_leave_room_holds_up_itself_alone() -> None:
    waiting = queues.queue()
    queues.offer(waiting, *[queues.ticket(f"a{n}", team="a", shape="v1") for n in range(2)])
    queues.offer(
        waiting,
        queues.ticket("b0", team="b", shape="v1"),
        queues.ticket("a2", team="a", shape="v2"),
    )
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
    assert sorted(queues.drained(waiting)) == ["a0", "a1", "a2"]


def test_reshape_moves_tickets_without_moving_their_place() -> None:
    waiting = queues.queue()
    queues.offer(
        waiting,
        queues.ticket("a", shape="v2"),
        queues.ticket("b", shape="v1"),
        queues.ticket("c", shape="v2"),
    )
    waiting.reshape(lambda one: "v1", 0.0)
    assert waiting.shapes() == {"v1"}
    asked: list[str] = []
    assert waiting.take(lambda one: asked.append(one.request_id), 0.0) is None
    assert asked == ["a"]
    assert queues.drained(waiting) == ["a", "b", "c"]


def test_a_shape_that_nothing_will_ever_take_is_dropped() -> None:
    waiting = queues.queue()
    queues.offer(
        waiting,
        queues.ticket("a", shape="v1"),
        queues.ticket("b", queues.B, shape="v1"),
        queues.ticket("c", shape="v2"),
    )
    assert queues.names(waiting.drop("v1", queues.B)) == ["b"]
    assert queues.names(waiting.drop("v1")) == ["a"]
    assert queues.drained(waiting) == ["c"]


def test_each_band_is_bounded_and_batch_is_shed_first() -> None:
    waiting = queues.queue(queues.rules(2, 4))
    good = queues.offer(waiting, queues.ticket("b1", queues.B), queues.ticket("b2", queues.B))
    assert all(isinstance(answer, admission.Admitted) for answer in good)
    (full,) = queues.offer(waiting, queues.ticket("b3", queues.B), rate=0.1)
    assert full == admission.Refused(admission.Reason.QUEUE_FULL, 10.0)
    queues.offer(waiting, queues.ticket("s1", queues.S), queues.ticket("s2", queues.S))
    (made_room,) = queues.offer(waiting, queues.ticket("i1"))
    assert isinstance(made_room, admission.Admitted)
    assert queues.names(made_room.shed) == ["b2"]  # the youngest
    queues.offer(waiting, queues.ticket("i2"))
    (refused,) = queues.offer(waiting, queues.ticket("i3"))
    assert isinstance(refused, admission.Refused)
    assert queues.drained(waiting) == ["i1", "i2", "s1", "s2"]


def test_standard_gives_way_to_interactive_where_no_batch_is_left() -> None:
    waiting = queues.queue(queues.rules(9, 2))
    queues.offer(waiting, queues.ticket("s1", queues.S), queues.ticket("s2", queues.S))
    (answer,) = queues.offer(waiting, queues.ticket("i1"))
    assert isinstance(answer, admission.Admitted)
    assert queues.names(answer.shed) == ["s2"]
    (answer,) = queues.offer(waiting, queues.ticket("s3", queues.S))
    assert isinstance(answer, admission.Refused)


def test_who_floods_a_full_band_gives_way_to_who_does_not() -> None:
    waiting = queues.queue(queues.rules(4))
    queues.offer(waiting, *[queues.ticket(f"a{n}", team="a") for n in range(4)])
    (answer,) = queues.offer(waiting, queues.ticket("a4", team="a"))
    assert isinstance(answer, admission.Refused)
    shed = []
    for n in range(3):
        (answer,) = queues.offer(waiting, queues.ticket(f"b{n}", team="b"))
        shed.append(
            queues.names(answer.shed) if isinstance(answer, admission.Admitted) else "refused"
        )
    assert shed == [["a3"], ["a2"], "refused"]  # two each: nobody holds more than the other


def test_bytes_are_bounded_as_well() -> None:
    waiting = queues.queue(queues.rules(size=100, total_size=150))
    assert isinstance(queues.offer(waiting, queues.ticket("huge", size=101))[0], admission.Refused)
    queues.offer(waiting, queues.ticket("b", queues.B, size=90), queues.ticket("i", size=60))
    assert waiting.size == 150
    (answer,) = queues.offer(waiting, queues.ticket("j", size=40))
    assert isinstance(answer, admission.Admitted)
    assert queues.names(answer.shed) == ["b"]
    assert waiting.size == 100
    (answer,) = queues.offer(waiting, queues.ticket("k", size=1))
    assert isinstance(answer, admission.Refused)
    assert queues.drained(waiting) == ["i", "j"]
    assert waiting.size == 0


def test_deadlines_refuse_and_expire() -> None:
    waiting = queues.queue()
    (late,) = queues.offer(waiting, queues.ticket("late", deadline=5.0), now=5.0)
    assert isinstance(late, admission.Refused)
    assert late.reason is admission.Reason.EXPIRED
    for name, at in (("c", 9.0), ("a", 6.0), ("b", 7.0)):
        queues.offer(waiting, queues.ticket(name, deadline=at))
    queues.offer(waiting, queues.ticket("ever"))
    assert waiting.expire(5.9) == ()
    assert queues.names(waiting.expire(7.0)) == ["a", "b"]
    assert queues.names(waiting.expire(99.0)) == ["c"]
    assert "ever" in waiting


def test_a_deadline_that_cannot_be_met_is_refused_now() -> None:
    waiting = queues.queue()
    queues.offer(waiting, *[queues.ticket(str(n)) for n in range(9)])
    (answer,) = queues.offer(
        waiting, queues.ticket("x", deadline=4.0), rate=2.0
    )  # the tenth leaves at 5 s
    assert answer == admission.Refused(admission.Reason.UNMEETABLE, 1.0)
    (answer,) = queues.offer(waiting, queues.ticket("y", deadline=6.0), rate=2.0)
    assert isinstance(answer, admission.Admitted)
    (answer,) = queues.offer(
        waiting, queues.ticket("z", deadline=0.5)
    )  # nothing measured: let it try
    assert isinstance(answer, admission.Admitted)


def test_a_flood_does_not_make_the_deadline_of_another_team_unmeetable() -> None:
    waiting = queues.queue()
    queues.offer(waiting, *[queues.ticket(str(n), team="a") for n in range(90)])
    (answer,) = queues.offer(
        waiting, queues.ticket("x", team="b", deadline=1.5), rate=2.0
    )  # second in turn
    assert isinstance(answer, admission.Admitted)
    (answer,) = queues.offer(
        waiting, queues.ticket("y", team="b", deadline=1.5), rate=2.0
    )  # fourth
    assert answer == admission.Refused(admission.Reason.UNMEETABLE, 1.0)


def test_standard_ages_into_turns_of_its_own() -> None:
    waiting = queues.queue(queues.rules(age_s=10.0, age_turns=4))
    queues.offer(waiting, *[queues.ticket(f"s{n}", queues.S) for n in range(3)])
    queues.offer(waiting, *[queues.ticket(f"i{n}") for n in range(20)])

    def next_eight(now: float) -> str:
        taken = [waiting.take(lambda one: one, now) for _ in range(8)]
        return "".join(found[0].request_id[0] for found in taken if found)

    assert next_eight(9.0) == "iiiiiiii"
    assert next_eight(10.0) == "siiisiii"


def test_batch_never_ages() -> None:
    waiting = queues.queue(queues.rules(age_s=0.0, age_turns=2))
    queues.offer(waiting, queues.ticket("b", queues.B), *[queues.ticket(f"i{n}") for n in range(5)])
    assert queues.drained(waiting, now=1e6)[-1] == "b"


def test_who_leaves_is_forgotten_everywhere() -> None:
    waiting = queues.queue()
    queues.offer(
        waiting, queues.ticket("a", deadline=1.0, shape="x"), queues.ticket("b", shape="x")
    )
    removed = waiting.remove("a")
    assert removed is not None
    assert removed.request_id == "a"
    assert waiting.remove("a") is None
    assert waiting.expire(9.0) == ()
    oldest = waiting.oldest(queues.I)
    assert oldest is not None
    assert oldest.request_id == "b"
    assert queues.drained(waiting) == ["b"]


def test_drain_rate_counts_only_while_somebody_waits() -> None:
    rate = drain.DrainRate(window_s=10.0, least=3)
    for second in range(5):
        rate.departed(float(second), others_wait=False)
    assert rate.per_s(5.0) is None
    for second in range(4):
        rate.departed(second / 2, others_wait=True)
    assert rate.per_s(2.0) == 2.0
    assert rate.per_s(4.0) == 1.0  # it has stalled since
    assert rate.per_s(15.5) == 0.2  # the last three
    rate.departed(16.0, others_wait=False)
    assert rate.per_s(16.0) is None  # that crowd is gone


def test_a_band_of_long_answers_has_a_drain_rate_too() -> None:
    """One departure in 40 s is none in most windows, and its callers were told to ask each second."""
    rate = drain.DrainRate()
    rate.departed(0.0, others_wait=True)
    assert rate.per_s(39.0) is None
    for second in (40.0, 80.0):
        rate.departed(second, others_wait=True)
        assert rate.per_s(second) == pytest.approx(1 / 40)
    assert drain.retry_after_s(1, rate.per_s(80.0)) == pytest.approx(40.0)
    assert rate.per_s(240.0) == pytest.approx(3 / 240)  # it has stalled since
    assert rate.per_s(700.0) is None  # too old to believe


def test_a_few_departures_at_once_are_no_rate() -> None:
    rate = drain.DrainRate()
    for second in (0.0, 0.1, 0.1):
        rate.departed(second, others_wait=True)
    assert rate.per_s(0.1) is None
    for _ in range(20):  # many are one at once
        rate.departed(1.0, others_wait=True)
    assert rate.per_s(1.0) == pytest.approx(22.0)
    rate.departed(30.0, others_wait=True)
    assert rate.per_s(30.0) == pytest.approx(4 / 29)  # of a window's many the last few are left


@pytest.mark.parametrize(
    ("places", "rate", "seconds"), [(1, None, 1), (1, 10.0, 1), (10, 2.0, 5), (999, 0.1, 60)]
)
def test_retry_after(places: int, rate: float | None, seconds: float) -> None:
    assert drain.retry_after_s(places, rate) == seconds
