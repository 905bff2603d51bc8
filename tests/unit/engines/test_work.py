"""The engine's counters of work: busy is wall time with steps in it, whoever ran in them."""

from engines.replica import work


def test_the_first_step_counts_from_the_works_arrival_and_rest_is_not_busy() -> None:
    meter = work.Meter()
    meter.begin(10.0)
    meter.begin(10.2)  # a second sequence makes nothing busier
    meter.step(10.5, prefill=100, decode=1, more=True)
    assert meter.read(10.6) == work.Work(600_000, 100, 1, 1)
    meter.step(10.7, prefill=0, decode=2, more=False)
    assert meter.read(99.0) == work.Work(700_000, 100, 3, 2)
    meter.begin(100.0)
    meter.rest(100.25)  # it left before a step was made
    meter.rest(101.0)
    assert meter.read(200.0).busy_us == 950_000


def test_a_step_without_a_beginning_and_a_clock_that_stands_take_no_time() -> None:
    meter = work.Meter()
    meter.step(5.0, prefill=1, decode=1, more=True)
    meter.step(4.0, prefill=1, decode=1, more=False)
    assert meter.read(9.0) == work.Work(0, 2, 2, 2)
