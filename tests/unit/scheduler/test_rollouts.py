"""A rollout's steps."""

import dataclasses
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from scheduler.core import rollouts
from scheduler.core.rollouts import State

S = 1_000_000
ROLLOUT = rollouts.Rollout("chat", "v2", {"v1": 100}, (5, 50, 100), 60, "ada", keep_s=120)


def seen(at_s: float, **changes: Any) -> rollouts.Seen:
    found = rollouts.Seen(round(at_s * S), serving=2, wanted=2, requests=100)
    return dataclasses.replace(found, **changes)


def test_it_warms_steps_keeps_and_ends() -> None:
    at = rollouts.after(ROLLOUT, seen(1, serving=1))
    assert (at, at.weights()) == (ROLLOUT, {"v1": 100})
    at = rollouts.after(at, seen(2))
    assert (at.state, at.weights()) == (State.STEPPING, {"v1": 95, "v2": 5})
    assert rollouts.after(at, seen(61)) == at
    assert rollouts.after(at, seen(100, requests=19)) == at
    at = rollouts.after(at, seen(62))
    assert at.weights() == {"v1": 50, "v2": 50}
    at = rollouts.after(at, seen(130))
    assert (at.state, at.weights()) == (State.KEEPING, {"v1": 0, "v2": 100})
    assert rollouts.after(at, seen(200)) == at
    at = rollouts.after(at, seen(260))
    assert (at.state, at.outcome, at.weights()) == (State.OVER, "done", {"v1": 0, "v2": 100})
    assert rollouts.after(at, seen(999, verdict="late")) == at


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "TTFT is worse"}, "TTFT is worse"),
        ({"serving": 0}, "no replica of v2 serves any more"),
        ({"quarantined": "no such folder"}, "v2 does not start: no such folder"),
    ],
)
def test_it_goes_back_by_itself_at_any_step(step: int, change: dict[str, Any], said: str) -> None:
    state = State.KEEPING if step == 2 else State.STEPPING
    at = dataclasses.replace(ROLLOUT, state=state, step=step)
    over = rollouts.after(at, seen(1, **change))
    assert (over.state, over.reason, over.weights()) == (State.OVER, said, {"v1": 100})


def test_a_version_that_does_not_come_up_fails_before_anything_moved() -> None:
    over = rollouts.after(ROLLOUT, seen(1801, serving=0))
    assert (over.outcome, over.reason) == ("failed", "0 of 2 replicas of v2 are up after 1801 s")
    assert over.weights() == {"v1": 100}


def test_a_gate_is_waited_for_and_its_no_goes_back() -> None:
    at = dataclasses.replace(ROLLOUT, state=State.STEPPING, step=0, gate=True)
    assert rollouts.after(at, seen(90)) == at
    assert rollouts.waits_for(at, seen(90)) == "the quality gate's verdict"
    assert rollouts.after(dataclasses.replace(at, gate_passed=True), seen(90)).percent == 50
    no = dataclasses.replace(at, gate_passed=False, gate_reason="0.71 < 0.80")
    assert rollouts.after(no, seen(90)).reason == "the quality gate says no: 0.71 < 0.80"


def test_one_that_ends_below_100_stays() -> None:
    at = dataclasses.replace(ROLLOUT, steps=(5,), state=State.STEPPING, step=0)
    assert rollouts.after(at, seen(9999)) == at
    assert "stays at 5 percent" in rollouts.waits_for(at, seen(9999))
    assert rollouts.stays(at, seen(9999))
    assert not rollouts.stays(at, seen(1))
    assert not rollouts.stays(dataclasses.replace(at, gate=True), seen(9999))
    assert not rollouts.stays(dataclasses.replace(at, steps=(5, 100)), seen(9999))


@hypothesis.given(
    st.dictionaries(st.sampled_from(["v1", "v2", "v3"]), st.integers(1, 100), min_size=1),
    st.integers(0, 100),
)
def test_percents_always_add_up_to_100(shares: dict[str, int], percent: int) -> None:
    total = sum(shares.values())
    before = {name: share * 100 // total for name, share in shares.items()}
    before[next(iter(before))] += 100 - sum(before.values())
    hypothesis.assume(set(before) != {"v2"})
    at = dataclasses.replace(ROLLOUT, before=before, steps=(percent,), step=0)
    assert sum(at.weights().values()) == 100
    assert all(share >= 0 for share in at.weights().values())
    assert at.weights().get("v2", 0) == percent
