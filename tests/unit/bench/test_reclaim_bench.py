"""The arithmetic of bench-reclaim, and that its page tells a missed goal from a met one."""

from typing import Any

import pytest

from tests.bench import reclaim, reclaim_report, reclaim_trials


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
        "rung3": rung | {"ready_s": spread(2.0)},
        "slurm_preemption_s": {"grace0": spread(2.5), "grace3": spread(18.0)},
        "slurm": {"KillWait": "5 sec"},
        "interactive_ttft_ms": {"quiet": spread(100.0), "spike": spread(105.0)},
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
    assert page.count(": met") == 8
    assert "Not measured on a GPU" in page
    worse = result(
        rung3={**result()["rung3"], "ready_s": spread(6.0)},
        interactive_ttft_ms={"quiet": spread(100.0), "spike": spread(120.0)},
        batch=result()["batch"] | {"lost": 1, "throughput_vs_run_batch": 0.9},
    )
    assert sum("missed" in line for line in reclaim_report.goals(worse)) == 6
