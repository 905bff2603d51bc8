"""The figures of a gateway bench as tables in its report, between two marks that are kept."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BEGIN = "<!-- figures: written by make bench-gateway -->"
END = "<!-- end of figures -->"
_NAMES = {
    "direct": "direct",
    "forebay": "Forebay",
    "vllm_router": "vllm-router (cache_aware)",
    "smg": "smg (cache_aware)",
    "litellm": "LiteLLM",
}


def machine() -> dict[str, str]:
    """Return what the figures depend on: processor, cores, kernel, Python, load before the run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return {
        "cpu": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def on_machine(there: Mapping[str, str]) -> str:
    """Return what `machine` found as a line."""
    return (
        f"{there['date']}, {there['cpu']}, {there['cores']} cores, Linux {there['kernel']}, "
        f"CPython {there['python']}, load {there['load_before']} before the run."
    )


def tables(result: Mapping[str, Any]) -> str:
    """Return the Markdown between the marks."""
    names = list(result["cpu_us_per_request"])
    there = result["machine"]
    head = (
        f"{on_machine(there)} {result['plan']['rounds']} rounds. "
        + ", ".join(f"{_NAMES[name]} {v}" for name, v in result["versions"].items())
        + "."
    )
    rows = [
        "| | CPU a request, µs | the same, one at a time | added p50, ms | added p99, ms | requests/s at 32 "
        "| CPU a token, µs | tokens/s (streams) | RSS, MiB: start → half → end |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [_row(result, name) for name in names]
    ratios = [
        "| Forebay ÷ | CPU a request | CPU a token | added p50 |",
        "| --- | --- | --- | --- |",
    ]
    for peer, found in result["ratios"].items():
        cells = [_ratio(found[key]) for key in ("cpu_per_request", "cpu_per_token")]
        cells.append(f"{found['added_latency_p50']['median']:.2f}")
        ratios.append(f"| {_NAMES[peer]} | {' | '.join(cells)} |")
    counted = ", ".join(f"{_NAMES[n]} {c:,}" for n, c in result["rss_requests"].items())
    bad = {**result["bad"], "after": sum(result["rss_bad"].values())}
    notes = f"Requests before the last memory figure: {counted}. Failed requests: {_bad(bad)}."
    for name, why in result.get("dropped", {}).items():
        notes += f" Not compared: {_NAMES[name]} ({why.splitlines()[0]})."
    return "\n\n".join([head, "\n".join(rows), "\n".join(ratios), notes])


def _row(result: Mapping[str, Any], name: str) -> str:
    def spread(phase: str, key: str, show: Callable[[float], str]) -> str:
        values = sorted(figures[phase][key] for figures in result["rounds"][name])
        middle = values[len(values) // 2]
        return f"{show(middle)} ({show(values[0])}–{show(values[-1])})"

    routed = name != "direct"
    added = result["added_latency_ms"][name]
    memory = result["rss_mb"].get(name)
    cells = [
        spread("closed", "cpu_us_per_request", "{:.0f}".format) if routed else "–",
        spread("serial", "cpu_us_per_request", "{:.0f}".format) if routed else "–",
        f"{added['p50']:.2f}" if routed else "–",
        f"{added['p99']:.2f}" if routed else "–",
        spread("closed", "requests_per_s", "{:.0f}".format),
        spread("streams", "cpu_us_per_token", "{:.1f}".format) if routed else "–",
        f"{spread('streams', 'tokens_per_s', '{:.0f}'.format)} ({result['streams'][name]})",
        " → ".join(f"{memory[key]:.0f}" for key in ("start", "half", "end")) if memory else "–",
    ]
    return f"| {_NAMES[name]} | {' | '.join(cells)} |"


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} ({found['least']:.2f}–{found['most']:.2f})" if found else "–"


def _bad(bad: Mapping[str, int]) -> str:
    named = [f"{name} {count}" for name, count in bad.items() if count]
    return ", ".join(named) or "none"


def write(report: Path, result: Mapping[str, Any]) -> None:
    """Put the tables between the marks of ``report``.

    Raises:
        ValueError: the marks are not there.
    """
    text = report.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{report}: the marks {BEGIN} and {END} are missing")
    report.write_text(f"{before}{BEGIN}\n{tables(result)}\n{END}{after}", encoding="utf-8")
