"""`make simulate-day`: the simulated day of the large site, policies side by side, and what they must show.

The large site is scaled down by fleet and traffic together at three factors, which must converge, and it is
checked by ten minutes at full scale in the morning's steep rise, beside the same minutes of the largest
factor. Processes share the work, the longest part first. The last line is JSON; ``--report`` writes the
figures as a page. ``--keep`` keeps each part's result, so that a run that was cut off goes on where it was.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scheduler.sim import charts, policies, run, scenario

FACTORS = (1 / 64, 1 / 32, 1 / 16)
COMPARED = 1 / 32
CHAT = 0.5
TEN_MINUTES_H = 1 / 6
GOALS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "utilisation": ("mean GPU utilisation > 60 %", lambda r: r["utilisation"] > 0.6),
    "ttft": ("interactive TTFT p95 < 500 ms to 4k prompts", lambda r: r["ttft_ms"]["p95"] < 500),
    "speed": ("19 of 20 streams at >= 40 tokens/s", lambda r: r["tokens_per_s_p5"] >= 40),
    "answered": ("99.9 % answered, each model", lambda r: r["availability_min"] >= 0.999),
    "gaps": (
        ">= 95 % of the GPU time that callers left is lent to batch",
        lambda r: (r["gaps"]["share"] or 0.0) >= 0.95,
    ),
}
CHAT_GOALS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "ttft": ("TTFT p99 < 1 s", lambda r: r["ttft_ms"]["p99"] < 1000),
    "tpot": ("time per output token p99 < 50 ms", lambda r: r["tpot_ms_p99"] < 50),
    "answered": ("99.9 % answered, each model", lambda r: r["availability_min"] >= 0.999),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One simulation: its place in the result, and what to run."""

    group: str
    name: str
    where: str
    policy: str
    factor: float
    hours: float = 0.0
    start_hour: float = -1.0

    @property
    def file(self) -> str:
        """Return the name of its kept result."""
        return f"{self.group}-{self.name}".replace("/", "of").replace(" ", "-") + ".json"

    def site(self) -> scenario.Scenario:
        """Return the site to simulate."""
        site = scenario.load(scenario.find(self.where)).scaled(self.factor)
        start = self.start_hour if self.start_hour >= 0 else site.start_hour
        return dataclasses.replace(site, hours=self.hours or site.hours, start_hour=start)


def parts(*, quick: bool) -> list[Part]:
    """Return every simulation of the suite, the longest first."""
    factors = FACTORS[:1] if quick else FACTORS
    compared = FACTORS[0] if quick else COMPARED
    found = [
        Part("convergence", f"1/{round(1 / factor)}", "large-site", "full", factor)
        for factor in factors
        if factor != compared
    ]
    found += [Part("policies", name, "large-site", name, compared) for name in policies.POLICIES]
    found.append(Part("chat_platform", "full", "chat-platform", "full", CHAT))
    for name, factor in (("full scale", 1.0), (f"1/{round(1 / factors[-1])}", factors[-1])):
        found.append(Part("ten_minutes", name, "large-site", "full", factor, TEN_MINUTES_H, 9.0))
    for name in ("azure-conversation", "azure-code", "mooncake-conversation"):
        found += [Part("traces", f"{name} {each}", name, each, 1.0) for each in ("static", "full")]
    return sorted(found, key=_weight, reverse=True)


def _weight(part: Part) -> float:
    hours = part.hours or (24 if part.where in {"large-site", "chat-platform"} else 0.2)
    return part.factor * hours * (10 if part.where == "chat-platform" else 100)


def simulate(part: Part) -> tuple[Part, dict[str, Any], list[Any]]:
    """Run one simulation."""
    began = time.process_time()
    site = part.site()
    result, books = run.simulate(site, part.policy)
    result["gpus"] = site.fleet.gpus
    result["cpu_s"] = round(time.process_time() - began, 1)
    return part, result, books.line


def kept(folder: Path | None, part: Part) -> tuple[Part, dict[str, Any], list[Any]]:
    """Return a part's result: from ``folder`` if it is there, else simulated, and then kept there."""
    file = folder / part.file if folder else None
    if file is not None and file.exists():
        result, line = json.loads(file.read_text())
        return part, result, line
    done = simulate(part)
    if file is not None:
        file.write_text(json.dumps(done[1:]))
    return done


def converged(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return how far the two larger factors are apart, as shares of the largest's figures."""
    names = sorted(results, key=lambda name: int(name.split("/")[1]))
    if len(names) < 2:
        return {}
    large, middle = results[names[0]], results[names[1]]

    def apart(one: float, other: float) -> float:
        return round(abs(one - other) / max(abs(one), 1e-9), 4)

    return {
        "utilisation": apart(large["utilisation"], middle["utilisation"]),
        "ttft_p50": apart(large["ttft_ms"]["p50"], middle["ttft_ms"]["p50"]),
        "ttft_p95": apart(large["ttft_ms"]["p95"], middle["ttft_ms"]["p95"]),
        "tpot_p99": apart(large["tpot_ms_p99"], middle["tpot_ms_p99"]),
    }


def verdict(found: Mapping[str, Any]) -> dict[str, bool]:
    """Return which goals are met."""
    full = found["policies"]["full"]
    others = [result for name, result in found["policies"].items() if name != "full"]
    goals = {name: test(full) for name, (_, test) in GOALS.items()}
    # A day's figures are good to about a point of utilisation, five milliseconds and a token a second:
    # more than the two largest factors are apart by.
    goals["no_worse_than_any"] = all(
        full["utilisation"] >= other["utilisation"] - 0.01
        and full["ttft_ms"]["p95"] <= other["ttft_ms"]["p95"] + 5
        for other in others
    )
    goals["better_on_one"] = all(
        full["utilisation"] > other["utilisation"] + 0.01
        or full["ttft_ms"]["p95"] < other["ttft_ms"]["p95"] - 5
        or full["tokens_per_s_p5"] > other["tokens_per_s_p5"] + 1
        for other in others
    )
    for name, (_, test) in CHAT_GOALS.items():
        goals[f"chat_{name}"] = test(found["chat_platform"]["full"])
    return goals


def main(argv: list[str]) -> int:
    """Run the suite; returns 0 if every goal is met."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="one factor: about five minutes")
    options.add_argument("--report", type=Path, help="write docs/bench/simulation.md here")
    options.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options.add_argument("--keep", type=Path, help="keep each part's result in this folder")
    asked = options.parse_args(argv)
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Any] = {}
    lines: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        each = functools.partial(kept, asked.keep)
        for part, result, line in pool.imap_unordered(each, parts(quick=asked.quick)):
            found.setdefault(part.group, {})[part.name] = result
            if part.group == "policies":
                lines[part.name] = line
                compared = f"1/{round(1 / part.factor)}"
                if part.policy == "full":
                    found.setdefault("convergence", {})[compared] = result
            passed = time.monotonic() - began
            print(
                f"[{passed:6.0f} s] {part.group} {part.name}\n{charts.figures(result)}", flush=True
            )
    found["apart"] = converged(found["convergence"])
    found["goals"] = verdict(found)
    found["wall_s"] = round(time.monotonic() - began)
    print(charts.terminal(lines["full"], found["policies"]["full"]["gpus"]))
    if asked.report is not None:
        from tests.bench import report_marks, simulation_report

        picture = asked.report.with_suffix(".png")
        ordered = {name: lines[name] for name in policies.POLICIES}
        charts.png(ordered, found["policies"]["full"]["gpus"], picture)
        page = simulation_report.page(found, picture.name, _machine())
        asked.report.write_text(report_marks.kept(asked.report, "calibration", page))
    print(json.dumps(found))
    return int(not all(found["goals"].values()))


def _machine() -> str:
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
