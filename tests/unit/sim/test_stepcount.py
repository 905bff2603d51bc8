"""The reference of continuous batching, met exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.sim import stepcount

SLOTS, BUDGET = 64, 442_504


@pytest.mark.parametrize(
    ("continuous", "steps", "latency", "occupancy"),
    [(False, 3301, 1454.4, 0.27), (True, 1331, 344.5, 0.68)],
)
def test_reference(continuous: bool, steps: int, latency: float, occupancy: float) -> None:
    found = stepcount.run(
        stepcount.reference_requests(), slots=SLOTS, kv_tokens=BUDGET, continuous=continuous
    )
    assert found.steps == steps
    assert round(found.mean_latency, 1) == latency
    assert round(found.occupancy, 2) == occupancy


def test_the_head_blocks_those_behind_it() -> None:
    requests = [
        stepcount.Request(0, 60, 40),
        stepcount.Request(0, 50, 1),
        stepcount.Request(0, 1, 1),
    ]
    found = stepcount.run(requests, slots=3, kv_tokens=100)
    assert found.steps == 41  # the third fits from the start and waits behind the second
    assert found.mean_latency == (40 + 41 + 41) / 3


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="never fits"):
        stepcount.run([stepcount.Request(0, 90, 20)], slots=1, kv_tokens=100)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 30)), max_size=30),
    st.integers(1, 8),
)
def test_busy_slots_are_the_tokens_asked_for(drawn: list[tuple[int, int, int]], slots: int) -> None:
    at = 0
    requests = []
    for gap, prompt, output in drawn:
        at += gap
        requests.append(stepcount.Request(at, prompt, output))
    for continuous in (False, True):
        found = stepcount.run(requests, slots=slots, kv_tokens=100, continuous=continuous)
        tokens = sum(request.output for request in requests)
        assert round(found.occupancy * found.steps * slots) == tokens
