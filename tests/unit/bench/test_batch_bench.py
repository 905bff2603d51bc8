"""The batch bench: medians, ratios by pool, what was computed again, what is kept when a part fails."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench import batch, batch_kept, batch_report


def run(number: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "round": number,
        "seconds": seconds,
        "tokens": 1_000,
        "lines": 10,
        "rss_mb": 90.0,
        "lost": 0,
        "duplicated": 0,
        "cached": 0.5,
        "preempted": 10,
        "recomputed": 0.01,
        **more,
    }


RUNS = {
    "run_batch": [run(0, 10.0), run(1, 20.0), run(2, 10.0)],
    "forebay": [run(0, 8.0), run(1, 20.0), run(2, 20.0)],
    "forebay_preempted": [run(0, 10.0), run(1, 25.0, recomputed=0.03, lost=1), run(2, 10.0)],
    "small_pool_run_batch": [run(0, 40.0), run(1, 99.0)],
    "small_pool_forebay": [run(0, 20.0)],
}


def test_each_round_is_compared_with_its_own_peer_on_its_own_pool() -> None:
    assert batch_report.ratios(RUNS) == {
        "forebay": 1.0,
        "forebay_preempted": 1.0,
        "small_pool_forebay": 2.0,
    }
    assert batch_report.overheads_ms(RUNS) == {
        "forebay": 0.0,
        "forebay_preempted": 0.0,
        "small_pool_forebay": -2_000.0,
    }


def test_a_round_without_its_peer_is_compared_with_no_other() -> None:
    runs = {"run_batch": [run(1, 10.0)], "forebay": [run(0, 40.0), run(1, 20.0)]}
    assert batch_report.ratios(runs) == {"forebay": 0.5}
    assert batch_report.ratios({**runs, "run_batch": []}) == {}


def test_the_last_line_is_what_was_promised() -> None:
    said = batch_report.result(
        RUNS, {"lines": 1_000_000, "lines_per_cpu_s": 5_000, "rss_mb": 150.0, "duplicated": 2}
    )
    assert json.loads(json.dumps(said)) == {
        "tokens_per_s": {"run_batch": 100.0, "forebay": 50.0, "forebay_preempted": 100.0},
        "of_run_batch": {"forebay": 1.0, "forebay_preempted": 1.0, "small_pool_forebay": 2.0},
        "recomputed_share": 0.03,
        "lines_per_cpu_s": 5_000,
        "rss_mb": {"1m_lines": 150.0},
        "lost": 1,
        "duplicated": 2,
    }
    assert batch_report.result({}, {})["tokens_per_s"]["forebay"] is None


def test_only_what_a_later_try_computes_counts_as_computed_again() -> None:
    def row(custom_id: str, prompt: int, output: int, tier: str = "batch") -> dict[str, Any]:
        return {
            "tier": tier,
            "custom_id": custom_id,
            "uncached_prompt_tokens": prompt,
            "output_tokens": output,
        }

    rows = [row("a", 50, 10), row("b", 20, 20), row("", 9, 9, "interactive"), row("a", 25, 25)]
    assert batch_report.recomputed(rows) == 25 / 150
    assert batch_report.recomputed([]) == 0


AT = {
    "cpu": "a",
    "cores": "2",
    "kernel": "6",
    "python": "3",
    "load_before": "0.1",
    "date": "2026-11-30 19:40 UTC",
    "commit": "abc",
}
VLLM = {
    "vllm": "0",
    "lines": 50,
    "prefixes": 2,
    "rounds": 3,
    "seats": 32,
    "pool": "128MiB",
    "small_pool": "16MiB",
    "runs": RUNS,
}


def test_the_report_says_every_figure_or_that_there_is_none() -> None:
    path = {"at": {**AT, "commit": "def"}, "figures": {"gateway_ms": 1.4, "runner_ms": 0.5}}
    text = batch_report.report({"vllm": {"at": AT, "figures": VLLM}, "path": path})
    assert "| small pool forebay | 50.0 | 200.0% | 50.0 | 20.0 | -2,000.0 | 50.0% |" in text
    assert "gateway; runner | 1.4 ms; 0.5 ms | |" in text
    assert "| shared texts exceed the pool | 200.0% | > 100 % |" in text
    assert "| lines a CPU-second of the runner | – | | ≥ 3,000 |" in text
    assert "| CPU of a line on its way | 2026-11-30 19:40 UTC | def | 0.1 |" in text
    assert "{" not in text
    assert "| forebay |" not in batch_report.report({"path": path})


def test_a_part_that_fails_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[list[str]] = []
    place = tmp_path / "there" / "kept.json"
    kept = batch_kept.Kept(place, lambda parts: told.append(list(parts)))
    kept.keep("alone", {"lines": 3}, AT)

    def fails() -> None:
        pytest.fail("no such event")

    assert kept.attempt("vllm", fails) is None
    assert kept.attempt("big", lambda: 5) == 5
    assert batch_kept.ended(kept, {"lost": 0}) == 1
    said = capsys.readouterr().out.splitlines()
    assert any("no such event" in line for line in said)
    assert json.loads(said[-1]) == {"lost": 0, "failed": ["vllm"]}

    def breaks(parts: Mapping[str, Any]) -> None:
        raise ZeroDivisionError(parts)

    again = batch_kept.Kept(place, breaks)
    again.keep("path", {"lines": 4}, AT)  # a report that can't be written loses no figure
    assert json.loads(place.read_text()) == {
        "alone": {"at": AT, "figures": {"lines": 3}},
        "path": {"at": AT, "figures": {"lines": 4}},
    }
    assert told == [["alone"]]
    assert again.failed == ["report"]
    assert batch_kept.ended(batch_kept.Kept(place, breaks), {}) == 0


def test_an_arm_that_fails_leaves_the_others_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arm(self: batch.Engines, home: Path, data: Path, name: str, pool: str) -> dict[str, Any]:
        if home.name == "forebay-0":
            raise TimeoutError
        assert (pool == batch.SMALL_POOL) is name.startswith(batch_report.SMALL)
        return run(7, 10.0, lines=data.read_bytes().count(b"\n"))

    monkeypatch.setattr(batch.Engines, "run", arm)
    kept = batch_kept.Kept(tmp_path / "kept.json", lambda parts: None)
    argv = [
        "--lines",
        "50",
        "--rounds",
        "2",
        "--arms",
        "run_batch",
        "forebay",
        "small_pool_forebay",
    ]
    found = batch.compare(batch.parser().parse_args(argv), tmp_path, kept)
    assert {name: [each["round"] for each in runs] for name, runs in found.items()} == {
        "run_batch": [0, 1],
        "forebay": [1],
        "small_pool_forebay": [0, 1],
    }
    assert kept.failed == ["round 1 forebay"]
    figures = json.loads((tmp_path / "kept.json").read_text())["vllm"]["figures"]
    assert figures["runs"] == found
    assert (figures["lines"], figures["rounds"]) == (50, 2)


def test_only_arms_that_there_are_run() -> None:
    assert [name for name, _ in batch.arms(())] == list(RUNS)
    with pytest.raises(SystemExit):
        batch.parser().parse_args(["--arms", "nonsense"])


def test_both_arms_tell_what_came_from_the_cache_in_the_same_words() -> None:
    def line(prompt: int, **more: Any) -> dict[str, Any]:
        return {"response": {"body": {"usage": {"prompt_tokens": prompt, **more}}}}

    lines = [line(100, prompt_tokens_details={"cached_tokens": 64}), line(100)]
    assert batch.cached([*lines, line(56, prompt_tokens_details=None)]) == 0.25
    assert batch.cached([]) == 0


def test_half_of_the_lines_share_texts_and_no_two_are_equal() -> None:
    rows = [json.loads(line) for line in batch.written(200, 1).splitlines()]
    texts = [row["body"]["messages"][0]["content"] for row in rows]
    assert len({row["custom_id"] for row in rows}) == len(set(texts)) == 200
    beginnings = [text[:200] for text in texts if len(text) > 1_000]
    assert len(beginnings) == 100
    assert len(set(beginnings)) == batch.prefixes(200)
