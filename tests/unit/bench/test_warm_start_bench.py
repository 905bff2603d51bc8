"""What the page of warm starts makes of its figures."""

from typing import Any

from tests.bench import gateway_report, warm_start_report

TIMES: dict[str, dict[str, float]] = {
    "parked": {"p50": 2.9, "least": 2.5, "most": 4.0, "trials": 20},
    "new_slot": {"p50": 31.0, "least": 20.0, "most": 40.0, "trials": 3},
}


def test_goals_are_judged_by_the_median() -> None:
    assert warm_start_report.goals(TIMES) == [
        "- out of a parked process, p50 at most 3 s: met (2.90, 20 trials)",
        "- without one, p50 at most 30 s: missed (31.00, 3 trials)",
    ]
    assert warm_start_report.goals({})[0] == "- out of a parked process: not measured"


def test_the_page_shows_every_way_that_was_taken() -> None:
    found: dict[str, Any] = {
        "machine": gateway_report.machine(),
        "order_to_first_token_s": TIMES,
        "phases_s": {"new_slot": {"fork server": 12.0, "engine": 6.0, "stage": 0.5}},
    }
    page = warm_start_report.page(found)
    assert "| `parked` | 2.90 | 2.50 | 4.00 | 20 |" in page
    assert "| `new_slot` | 0.50 | 18.00 |  |" in page
    assert "`plain`" not in page
