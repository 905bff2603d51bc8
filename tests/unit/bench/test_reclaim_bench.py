"""The arithmetic of bench-reclaim, and that its page tells a missed goal from a met one."""

import datetime
from typing import Any

import pytest

from tests.bench import (
    reclaim,
    reclaim_report,
    reclaim_site,
    reclaim_timeline,
    reclaim_trials,
    reclaim_ttft,
)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([], [], []),
        ([], [1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, 2.0], []),
        ([1.0, 2.0], [2.0, 3.0], [3.0]),
        ([1.0, 1.0], [1.0, 1.0, 1.0], [1.0]),
        ([1.0, 2.0], [7.0, 8.0], [7.0, 8.0]),
    ],
)
def test_new_entries_of_a_list_that_keeps_its_newest(
    before: list[float], after: list[float], new: list[float]
) -> None:
    assert reclaim_trials.fresh(before, after) == new


def test_the_first_token_is_the_first_one_on_that_replica_after_the_order() -> None:
    orders = [reclaim_trials.Order("r-1", 1_000_000.0), reclaim_trials.Order("r-2", 0.0)]
    rows = [
        {"replica_id": "r-1", "first_token_us": 900_000},
        {"replica_id": "r-1", "first_token_us": 1_500_000},
        {"replica_id": "r-1", "first_token_us": 1_200_000},
        {"replica_id": "r-3", "first_token_us": 1_100_000},
    ]
    assert reclaim_trials.first_tokens(orders, rows) == [0.2]


def test_the_ninety_ninth_percentile_of_few_is_their_maximum() -> None:
    found = reclaim.spread([3.0, 1.0, 2.0])
    assert found == {"n": 3, "p50": 2.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    assert reclaim.spread([]) == {}
    assert reclaim.spread([float(n) for n in range(200)])["p99"] == 198.0


def test_what_was_computed_again_is_a_share_of_all_that_was_computed() -> None:
    def row(custom_id: str, at: int, waste: int, prompt: int, output: int) -> dict[str, Any]:
        return {
            "batch_job_id": 1,
            "custom_id": custom_id,
            "arrived_us": at,
            "waste_tokens": waste,
            "uncached_prompt_tokens": prompt,
            "output_tokens": output,
        }

    resumed = [row("a", 2, 10, 0, 0), row("a", 1, 0, 10, 80)]
    assert reclaim.recomputed(resumed) == 0.1
    assert reclaim.recomputed([row("a", 1, 0, 10, 30), row("a", 2, 0, 10, 50)]) == 0.1
    assert reclaim.recomputed([row("a", 1, 0, 10, 30), row("b", 2, 0, 10, 50)]) == 0.0
    assert reclaim.recomputed([]) == 0.0


def spread(value: float) -> dict[str, float]:
    return {"n": 20, "p50": value, "p95": value, "p99": value, "max": value}


TTFT = {
    "quiet": spread(100.0),
    "spike": spread(105.0),
    "quiet_long": spread(200.0),
    "spike_long": spread(210.0),
    "spike_all": spread(400.0),
}
PARTS = {
    "parts_ms": dict.fromkeys(reclaim_ttft.PARTS, 20.0),
    "mean_ms": 100.0,
    "step_ms": 10.0,
    "batch_beside": 3.0,
    "failed": 0,
}


def result(**changes: Any) -> dict[str, Any]:
    rung = {
        "decision_s": {},
        "ready_s": spread(0.2),
        "first_token_s": {},
        "trials": 20,
        "failed": 0,
    }
    names = ("date", "cpu", "cores", "kernel", "python", "load_before")
    base: dict[str, Any] = {
        "machine": dict.fromkeys(names, "x"),
        "minutes": 1.0,
        "rung0": rung,
        "rung1": rung,
        "rung2": rung,
        "rung3": rung | {"ready_s": spread(2.0), "stages_s": [("told", 0.1, 0.2)]},
        "scancel_floor_s": spread(0.1),
        "ttft_parts": {"0": {"quiet": PARTS, "filled": PARTS}},
        "slurm_preemption_s": {"grace0": spread(2.5), "grace3": spread(18.0)},
        "slurm": {"KillWait": "5 sec"},
        "interactive_ttft_ms": TTFT,
        "batch": {
            "lost": 0,
            "duplicated": 0,
            "lines": 10,
            "preempted": 3,
            "recomputed_share": 0.001,
            "throughput_vs_run_batch": 0.99,
            "tokens_per_s": {"forebay": [99.0], "run_batch": [100.0]},
        },
    }
    return base | changes


def test_the_page_says_which_goals_are_met() -> None:
    page = reclaim_report.page(result())
    assert "missed" not in page
    assert page.count(": met") == 10
    assert "Not measured on a GPU" in page
    worse = result(
        rung3={**result()["rung3"], "ready_s": spread(6.0)},
        interactive_ttft_ms=TTFT | {"spike": spread(120.0)},
        batch=result()["batch"] | {"lost": 1, "throughput_vs_run_batch": 0.9},
    )
    assert sum("missed" in line for line in reclaim_report.goals(worse)) == 6


def test_stages_of_rung_3_add_up_to_the_whole_time() -> None:
    logs = {
        "agent": "2026-11-30 15:03:19,700 I engines.agent.lease leaving: asked\n"
        "2026-11-30 15:03:20,200 I engines.agent.slots slot l.s0: its step has ended with 0\n",
        "slot": "2026-11-30 15:03:19,690 I engines.slot.keeper replica r: serving → draining: stop\n"
        "2026-11-30 15:03:20,100 I engines.slot.keeper replica r: draining → stopped: stop\n",
        "slurmctld": "[2026-11-30T15:03:18.000] sched: Allocate JobId=8 NodeList=n1\n"
        "[2026-11-30T15:03:20.300] debug2: _slurm_rpc_complete_batch_script JobId=7: completing\n"
        "[2026-11-30T15:03:20.350] debug2: _slurm_rpc_epilog_complete: JobId=7 Node=n3\n"
        "[2026-11-30T15:03:20.360] debug2: _slurm_rpc_epilog_complete: JobId=71 Node=n3\n"
        "[2026-11-30T15:03:20.400] sched: Allocate JobId=8 NodeList=n3\n",
    }
    order = datetime.datetime(2026, 11, 30, 15, 3, 19, 500_000).timestamp()
    assert reclaim_timeline.ordered(order, logs["agent"]) == order
    told = reclaim_timeline.ordered(order + 0.4, logs["agent"])
    assert told == pytest.approx(order + 0.2, abs=1e-5)  # before the plan was written down
    found = reclaim_timeline.stages(order, order + 1.0, ("7", "8"), logs)
    assert list(found) == list(reclaim_timeline.STAGES)
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["batch"] == 0.0  # written before its agent's line
    assert found["epilog"] == pytest.approx(0.05, abs=1e-5)
    assert found["allocated"] == pytest.approx(0.05, abs=1e-5)
    assert reclaim_timeline.stages(order, order + 1.0, ("9", "8"), logs) == {}
    rows = reclaim_timeline.table([found, found])
    assert sum(mean for _, mean, _ in rows) == pytest.approx(1.0)


def test_a_callers_parts_add_up_to_what_it_saw() -> None:
    heard = [reclaim_site.Heard("a", 1_000, 61_000), reclaim_site.Heard("gone", 0, 1)]
    row = {
        "caller_request_id": "a",
        "arrived_us": 3_000,
        "started_us": 4_000,
        "first_token_us": 59_000,
    }
    (found,) = reclaim_ttft.parts(heard, [row], [12.0])
    assert found == {"way_in": 2.0, "gateway": 1.0, "seat": 12.0, "engine": 43.0, "way_out": 2.0}
    assert sum(found.values()) == 60.0


def test_a_trial_that_takes_too_long_costs_no_other_its_figures() -> None:
    found = reclaim_trials.Times()
    for _ in range(reclaim_trials.MOST_LATE):
        with found.bearing():
            raise TimeoutError("no lease")
    assert found.late == reclaim_trials.MOST_LATE
    assert any(
        "every trial came to its end: missed (3)" in line
        for line in reclaim_report.goals(result(rung3={**result()["rung3"], "late": 3}))
    )
    with pytest.raises(TimeoutError), found.bearing():
        raise TimeoutError("no lease")
