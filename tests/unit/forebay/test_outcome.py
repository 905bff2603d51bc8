"""The demo's verdict: a table that claims a success must not be printed over a failure."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich import console

from forebay.demo import load, outcome


def _line(custom_id: str, status: int = 200) -> str:
    response = {"status_code": status, "request_id": "r", "body": {}}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": response, "error": None})


def _lease(
    name: str, ours: int, sacct: int | None, *, agrees: bool | None, note: str = ""
) -> dict[str, object]:
    figures = {"forebay_us": ours, "sacct_us": sacct, "agrees": agrees}
    return {"lease_id": name, "gpus": 4, "note": note, **figures}


@pytest.fixture
def good() -> outcome.Outcome:
    """A run in which everything was as promised."""
    return outcome.Outcome(
        slurm="22.05.8",
        slurm_kind="devcluster",
        engine={"name": "vllm", "version": "0.32.0+cpu"},
        ttft_ms={name: {"p50": 40.0, "p95": 80.0} for name in ("before", "during", "after")},
        reclaim_s=[0.4, 0.6, 0.5],
        sent=72,
        answered=72,
        lines=200,
        done=200,
        preempted=31,
        leases=[
            _lease("l-1", 400_000_000, 404_000_000, agrees=True),
            _lease("l-2", 800_000_000, 800_000_000, agrees=True),
        ],
    )


def test_a_good_run_has_no_fault_and_says_its_figures(good: outcome.Outcome) -> None:
    assert good.faults() == []
    found = good.to_json()
    assert found["reclaim_s"] == {"p50": 0.5, "max": 0.6}
    assert found["gpu_seconds"] == {"forebay": 1200.0, "sacct": 1204.0}
    assert found["batch"]["preempted"] == 31
    text = io.StringIO()
    good.print(console.Console(file=text, width=100))
    assert "200 of 200 done, 0 lost, 0 duplicated, 31 times preempted" in text.getvalue()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answered": 71, "complaints": ["stream was cut"]}, "1 of 72 interactive requests"),
        ({"done": 199, "lost": 1}, "199 of 200 done, 1 lost"),
        ({"duplicated": 1}, "1 duplicated"),
        ({"preempted": 0}, "no batch line gave way"),
        ({"reclaim_s": [0.4, 5.2]}, "capacity came back in 5.2 s at worst"),
    ],
)
def test_each_broken_promise_is_a_fault(
    good: outcome.Outcome, change: dict[str, object], says: str
) -> None:
    faults = dataclasses.replace(good, **change).faults()  # type: ignore[arg-type]  # test table
    assert len(faults) == 1
    assert says in faults[0]


def test_books_that_disagree_or_are_missing_are_faults(good: outcome.Outcome) -> None:
    good.leases[0] = _lease("l-1", 400_000_000, 411_000_000, agrees=False)
    good.leases[1] = _lease("l-2", 800_000_000, None, agrees=None, note="no accounting")
    assert good.faults() == [
        "lease l-1: 11.0 GPU-seconds from sacct's figure",
        "lease l-2: not in both books: no accounting",
    ]


def test_lines_are_counted_from_the_published_file(tmp_path: Path, good: outcome.Outcome) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [_line("a"), _line("b"), _line("b"), _line("c", status=500)]
    file.write_text("\n".join(rows) + "\n")
    good.read_lines(file, 4)
    assert (good.done, good.lost, good.duplicated) == (2, 2, 1)


def test_a_spike_is_over_with_the_first_token_of_its_last_request() -> None:
    wave = [
        load.Answer(sent=10.0, ttft_ms=400.0, text="a", complete=True),
        load.Answer(sent=10.5, ttft_ms=300.0, text="b", complete=True),
    ]
    assert load.seated_s(wave) == pytest.approx(0.8)
    wave.append(load.Answer(sent=10.1, ttft_ms=None, text="", complete=False, error="cut"))
    assert load.seated_s(wave) == float("inf")
