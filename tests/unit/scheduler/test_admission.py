"""The admission queue: order, bounds, deadlines, places kept."""

import itertools

import pytest

from scheduler.contracts import requests
from scheduler.core import admission

I, S, B = requests.Tier.INTERACTIVE, requests.Tier.STANDARD, requests.Tier.BATCH  # noqa: E741 - tiers
BIG = admission.Bounds({I: 99, S: 99, B: 99}, 999)


def queue(bounds: admission.Bounds = BIG) -> admission.Queue:
    return admission.Queue(bounds)


def ticket(name: str, tier: requests.Tier = I, **fields: object) -> admission.Ticket:
    return admission.Ticket(name, tier, "team", 0.0, **fields)  # type: ignore[arg-type]  # by name


def offer(
    waiting: admission.Queue,
    *tickets: admission.Ticket,
    now: float = 0.0,
    rate: float | None = None,
) -> list[admission.Admitted | admission.Refused]:
    return [waiting.offer(one, now=now, drain_per_s=rate) for one in tickets]


def drain(waiting: admission.Queue) -> list[str]:
    taken = iter(lambda: waiting.take(lambda one: one.request_id), None)
    return [one.request_id for one, _ in taken]


def test_bands_first_then_first_come() -> None:
    waiting = queue()
    offer(waiting, ticket("b1", B), ticket("s1", S), ticket("i1"), ticket("b2", B), ticket("i2"))
    assert [one.request_id for one in waiting.tickets()] == ["i1", "i2", "s1", "b1", "b2"]
    assert waiting.waiting() == {"interactive": 2, "standard": 1, "batch": 2}
    assert drain(waiting) == ["i1", "i2", "s1", "b1", "b2"]
    assert len(waiting) == 0


def test_a_requeued_ticket_keeps_its_place() -> None:
    waiting = queue()
    offer(waiting, ticket("a"), ticket("b"), ticket("c"))
    first, _ = waiting.take(lambda one: True) or pytest.fail("nobody waits")
    offer(waiting, ticket("d"))
    waiting.requeue(first)
    assert drain(waiting) == ["a", "b", "c", "d"]


def test_a_ticket_that_was_not_taken_cannot_be_requeued() -> None:
    waiting = queue()
    offer(waiting, ticket("a"))
    for wrong in (waiting.tickets()[0], ticket("never")):
        with pytest.raises(ValueError, match="was not taken"):
            waiting.requeue(wrong)


def test_a_shape_that_finds_no_room_holds_up_only_its_lane() -> None:
    waiting = queue()
    offer(waiting, *[ticket(f"v2-{n}", shape="v2") for n in range(3)], ticket("v1", shape="v1"))
    asked: list[str] = []

    def place(one: admission.Ticket) -> str | None:
        asked.append(one.request_id)
        return "r1" if one.shape == "v1" else None

    taken = waiting.take(place)
    assert taken is not None
    assert taken[0].request_id == "v1"
    assert asked == ["v2-0", "v1"]  # one question a lane
    assert waiting.take(place) is None
    assert len(waiting) == 3


def test_reshape_moves_tickets_without_moving_their_place() -> None:
    waiting = queue()
    offer(waiting, ticket("a", shape="v2"), ticket("b", shape="v1"), ticket("c", shape="v2"))
    waiting.reshape(lambda one: "v1")
    asked: list[str] = []
    assert waiting.take(lambda one: asked.append(one.request_id)) is None
    assert asked == ["a"]
    assert drain(waiting) == ["a", "b", "c"]


def test_each_band_is_bounded_and_batch_is_shed_first() -> None:
    waiting = queue(admission.Bounds({I: 2, S: 2, B: 2}, 4))
    good = offer(waiting, ticket("b1", B), ticket("b2", B))
    assert all(isinstance(answer, admission.Admitted) for answer in good)
    (full,) = offer(waiting, ticket("b3", B), rate=0.1)
    assert full == admission.Refused(admission.Reason.QUEUE_FULL, 10.0)
    offer(waiting, ticket("s1", S), ticket("s2", S))
    (made_room,) = offer(waiting, ticket("i1"))
    assert isinstance(made_room, admission.Admitted)
    assert [one.request_id for one in made_room.shed] == ["b2"]  # the youngest
    offer(waiting, ticket("i2"))
    (refused,) = offer(waiting, ticket("i3"))
    assert isinstance(refused, admission.Refused)
    assert [one.request_id for one in waiting.tickets()] == ["i1", "i2", "s1", "s2"]


def test_a_full_queue_without_batch_refuses_the_urgent_too() -> None:
    waiting = queue(admission.Bounds({I: 9, S: 9, B: 9}, 1))
    offer(waiting, ticket("s1", S))
    (answer,) = offer(waiting, ticket("i1"))
    assert isinstance(answer, admission.Refused)


def test_deadlines_refuse_and_expire() -> None:
    waiting = queue()
    (late,) = offer(waiting, ticket("late", deadline=5.0), now=5.0)
    assert isinstance(late, admission.Refused)
    assert late.reason is admission.Reason.EXPIRED
    offer(
        waiting, *[ticket(name, deadline=at) for name, at in (("c", 9.0), ("a", 6.0), ("b", 7.0))]
    )
    offer(waiting, ticket("ever"))
    assert waiting.expire(5.9) == ()
    assert [one.request_id for one in waiting.expire(7.0)] == ["a", "b"]
    assert [one.request_id for one in waiting.expire(99.0)] == ["c"]
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
    assert drain(waiting) == ["b"]


def test_drain_rate_counts_only_while_somebody_waits() -> None:
    rate = admission.DrainRate(window_s=10.0, least=3)
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
    assert admission.retry_after_s(places, rate) == seconds


def test_removal_from_a_long_queue_is_fast_enough() -> None:
    """20,000 tickets come and leave from the middle; a linear search would take minutes."""
    waiting = queue(admission.Bounds({I: 99_999, S: 0, B: 0}, 99_999))
    names = [str(n) for n in range(20_000)]
    offer(waiting, *[ticket(name, deadline=float(n)) for n, name in enumerate(names, 1)])
    order = itertools.chain(range(10_000, 20_000), range(10_000))
    for at in order:
        assert waiting.remove(names[at]) is not None
    assert len(waiting) == 0
