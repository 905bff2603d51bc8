"""The batch bench's arithmetic: medians, ratios by pool, what was computed again, the last line's keys."""

import json
from typing import Any

from tests.bench import batch, batch_report, gateway_report


def run(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "tokens": 1_000,
        "lines": 10,
        "rss_mb": 90.0,
        "cpu_s": 0.1,
        "lost": 0,
        "duplicated": 0,
        "cached": 0.5,
        "preempted": 10,
        "recomputed": 0.01,
        **more,
    }


RUNS = {
    "run_batch": [run(10.0), run(20.0), run(10.0)],
    "forebay": [run(8.0), run(20.0), run(20.0)],
    "forebay_preempted": [run(10.0), run(25.0, recomputed=0.03, lost=1), run(10.0)],
    "small_pool_run_batch": [run(40.0)],
    "small_pool_forebay": [run(20.0)],
}


def test_each_round_is_compared_with_its_own_peer_on_its_own_pool() -> None:
    assert batch_report.ratios(RUNS) == {
        "forebay": 1.0,
        "forebay_preempted": 1.0,
        "small_pool_forebay": 2.0,
    }


def test_the_last_line_is_what_was_promised() -> None:
    said = batch_report.result(
        RUNS, {"lines": 1_000_000, "lines_per_cpu_s": 5_000, "rss_mb": 150.0, "duplicated": 2}
    )
    assert json.loads(json.dumps(said)) == {
        "tokens_per_s": {"run_batch": 100.0, "forebay": 50.0, "forebay_preempted": 100.0},
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


def test_the_report_says_every_figure_or_that_there_is_none() -> None:
    machine = gateway_report.machine()
    said = {
        "machine": machine,
        "vllm": "0",
        "lines": 50,
        "prefixes": 2,
        "rounds": 3,
        "seats": 32,
        "pool": "128MiB",
    }
    text = batch_report.report(
        {**said, "small_pool": "16MiB", "runs": RUNS, "alone": {}, "big": {}}
    )
    assert "| small pool forebay | 50.0 | 200.0% | 50.0 |" in text
    assert "| shared texts exceed the pool | 200.0% | > 100 % |" in text
    assert "| lines a CPU-second of the runner | – | | ≥ 3,000 |" in text


def test_half_of_the_lines_share_texts_and_no_two_are_equal() -> None:
    rows = [json.loads(line) for line in batch.written(200, 1).splitlines()]
    texts = [row["body"]["messages"][0]["content"] for row in rows]
    assert len({row["custom_id"] for row in rows}) == len(set(texts)) == 200
    beginnings = [text[:200] for text in texts if len(text) > 300]
    assert len(beginnings) == 100
    assert len(set(beginnings)) == batch.prefixes(200)
