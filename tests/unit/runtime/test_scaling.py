"""What the autoscaler is told: bounds from the configuration, measured starts, requests a second."""

from typing import Any

import pytest

from scheduler.contracts import fleet
from scheduler.core import autoscale
from scheduler.runtime import arrivals, config, scaling

KEY = ("chat", "v1")


def test_bounds_are_read_and_measured_starts_put_in() -> None:
    bounds = scaling.from_mapping({"floor": 2, "maximum": 8, "park_gb": 16.5})
    assert bounds == autoscale.Scaling(floor=2, maximum=8, park_gb=16.5)
    starts = scaling.Starts()
    assert starts.applied(KEY, bounds) == bounds
    for seconds in (100.0, 120.0, 600.0):
        starts.note(KEY, {"load": seconds}, woken=False)
    starts.note(KEY, {"allocate": 1.0, "load": 2.0}, woken=True)
    measured = starts.applied(KEY, bounds)
    assert (measured.start_s, measured.wake_s, measured.floor) == (120.0, 3.0, 2)
    assert starts.applied(("other", "v1"), bounds) == bounds


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"flor": 1}, "scaling.flor is unknown: one of floor, minimum, maximum"),
        ({"floor": -1}, "scaling.floor = -1: must be a whole number from 0"),
        ({"floor": 1.5}, "scaling.floor = 1.5: must be a whole number from 0"),
        ({"floor": True}, "scaling.floor = True: must be a whole number"),
        ({"park_gb": "16G"}, "scaling.park_gb = '16G': must be a number from 0"),
        ({"start_s": 3}, "scaling.start_s is unknown"),
        ({"floor": 4, "maximum": 3}, "scaling.floor 4 exceeds maximum 3"),
        ({"batch_floor": 4, "batch_maximum": 3}, "scaling.batch_floor 4 exceeds batch_maximum 3"),
    ],
)
def test_bad_bounds_say_which(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault.replace("(", r"\(")):
        config.ModelSettings(name="chat", engine=fleet.EngineKind.SIMULATED, scaling=given)


def test_rates_are_of_the_last_minute_and_add_up_over_gateways() -> None:
    rates = arrivals.Rates()
    for second in range(0, 121, 1):
        rates.note("g1", "chat", second * 10, float(second))
        rates.note("g2", "chat", second * 5, float(second))
    assert rates.by_model() == {"chat": pytest.approx(15.0)}
    for second in range(121, 200):
        rates.note("g1", "chat", 1_200, float(second))
    rates.forget("g2")
    assert rates.by_model() == {"chat": pytest.approx(0.0)}


def test_a_counter_that_went_back_is_a_new_process() -> None:
    rates = arrivals.Rates()
    rates.note("g1", "chat", 1_000_000, 0.0)
    rates.note("g1", "chat", 3, 10.0)
    rates.note("g1", "chat", 13, 20.0)
    assert rates.by_model() == {"chat": 1.0}
