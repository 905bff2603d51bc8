"""What an operation of the admission queue costs, in comparisons of deadlines."""

import random
from typing import Any

import pytest

from scheduler.contracts import requests
from scheduler.core import admission
from tests.unit.scheduler import queues


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
        return queues.ticket(str(n), team=str(draw.randrange(100)), shape=n % 3, deadline=deadline)

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
