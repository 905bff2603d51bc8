"""What a refused caller is told of the queue: how fast its own band empties, as it was measured."""

import pytest

from gateway import local_waiter
from scheduler.contracts import clock, errors, requests
from tests.unit.gateway import fleets
from tests.unit.gateway.test_room_rules import NOW_US, ask, room

STEP_S = 8.0  # one answer's time: fewer than any window of some seconds could count


async def test_retry_after_and_deadlines_go_by_the_measured_rate_of_the_band(
    fake_clock: clock.FakeClock,
) -> None:
    made, _ = room(
        fake_clock,
        fleets.make_replica("r1", seats=1),
        queue_interactive=6,
        queue_standard=1,
        deadline_interactive_s=600.0,
    )
    there: list[local_waiter.LocalWaiter] = [made.enter(ask("q0"))]
    there += [made.enter(ask(f"q{n}")) for n in range(1, 7)]
    with pytest.raises(errors.Shed) as first:
        made.enter(ask("early"))
    assert first.value.retry_after_s == 1.0  # nothing was measured yet
    for n in range(3):
        await fake_clock.advance(STEP_S)
        made.leave(there.pop(0))
        await fake_clock.advance(0)
        assert there[0].open is not None
        there.append(made.enter(ask(f"r{n}")))

    with pytest.raises(errors.Shed) as full:
        made.enter(ask("full"))
    assert full.value.retry_after_s == pytest.approx(STEP_S)
    made.leave(there.pop())
    arrived_us = NOW_US + round(3 * STEP_S * 1e6)
    with pytest.raises(errors.Expired, match="longer than the deadline allows") as late:
        made.enter(ask("late", deadline_us=arrived_us + round(2 * STEP_S * 1e6)))
    assert late.value.retry_after_s == pytest.approx(4 * STEP_S)  # the sixth in turn
    there.append(made.enter(ask("in time", deadline_us=arrived_us + round(7 * STEP_S * 1e6))))
    there.append(made.enter(ask("s0", requests.Tier.STANDARD)))
    with pytest.raises(errors.Shed) as other:
        made.enter(ask("s1", requests.Tier.STANDARD))
    assert other.value.retry_after_s == 1.0  # of its own band nothing was measured
    for waiter in there:
        made.leave(waiter)
    assert made.loads.idle
