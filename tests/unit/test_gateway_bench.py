"""The arithmetic of the gateway bench, and the report that it writes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench import gateway, gateway_load, gateway_report, gateway_subjects, processes


def figures(cpu: float, p50: float) -> dict[str, dict[str, Any]]:
    closed = {
        "cpu_us_per_request": cpu,
        "requests_per_s": 1e6 / max(cpu, 1),
        "p50_ms": p50,
        "p99_ms": 2 * p50,
        "bad": 0,
        "requests": 100,
    }
    streams = {"bad": 0, "tokens_per_s": 12_800.0, "cpu_us_per_token": cpu / 10}
    return {"serial": closed, "closed": closed, "streams": streams}


ROUNDS = {
    "direct": [figures(0, 0.1)] * 3,
    "forebay": [figures(100, 0.6), figures(120, 0.7), figures(90, 0.5)],
    "vllm_router": [figures(200, 1.1), figures(200, 1.1), figures(300, 1.1)],
}


def test_ratios_are_taken_round_by_round() -> None:
    found = gateway.summary(ROUNDS)
    assert found["cpu_us_per_request"]["forebay"] == 100
    assert found["ratios"]["vllm_router"]["cpu_per_request"] == {
        "median": 0.5,
        "least": 0.3,
        "most": 0.6,
    }
    assert found["added_latency_ms"]["forebay"] == {"p50": 0.5, "p99": 1.0}
    assert found["ratios"]["vllm_router"]["added_latency_p50"] == {"median": 0.5}
    assert set(found["ratios"]) == {"vllm_router"}


def test_the_report_keeps_its_words(tmp_path: Path) -> None:
    memory = {"start": 1.0, "half": 2.0, "end": 2.0, "requests": 50, "bad": 1}
    result = {
        **gateway.summary(ROUNDS),
        **gateway._memory({"forebay": memory, "vllm_router": memory}),
        "versions": {"forebay": "1", "vllm_router": "2"},
        "rounds": ROUNDS,
        "machine": gateway_report.machine(),
        "plan": {"rounds": 3},
        "streams": dict.fromkeys(ROUNDS, 256),
    }
    report = tmp_path / "report.md"
    report.write_text(f"before\n{gateway_report.BEGIN}\nold\n{gateway_report.END}\nafter\n")
    gateway_report.write(report, result)
    text = report.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| Forebay | 100 (90–120) |" in text
    report.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        gateway_report.write(report, result)


def test_bodies_are_2_kb_and_never_come_again() -> None:
    made = gateway_load.bodies()
    some = [next(made) for _ in range(20)]
    assert len(set(some)) == 20
    assert all(1900 < len(body) < 2200 for body in some)


def test_this_process_has_used_something() -> None:
    assert processes.cpu_s(os.getpid()) > 0
    assert processes.rss_mb(os.getpid()) > 1


def test_prefix_routing_is_told_beside_the_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "prefix_hit_share": {"forebay": 0.39, "oracle": 0.41},
        "ttft_ms_mean": {"forebay": 454.0},
        "versions": {"vllm": "0.32"},
        "arms": ["of no interest here"],
    }
    done = subprocess.CompletedProcess([], 0, f"a line\n{json.dumps(told)}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert gateway.prefix_routing(10) == {
        "prefix_hit_share": told["prefix_hit_share"],
        "ttft_ms_mean": told["ttft_ms_mean"],
        "prefix_versions": told["versions"],
    }
    done.returncode = 1
    with pytest.raises(gateway_subjects.BenchError, match="ended with 1"):
        gateway.prefix_routing(10)
