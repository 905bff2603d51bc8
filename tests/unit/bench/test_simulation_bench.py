"""The arithmetic of `make simulate-day`: how far factors are apart, which goals are met, the page."""

import json
from pathlib import Path
from typing import Any

from scheduler.sim import policies, scenario, tally
from tests.bench import simulation, simulation_report


def result(utilisation: float = 0.8, p95: float = 200.0, speed: float = 45.0) -> dict[str, Any]:
    site = scenario.load(scenario.find("large-site")).scaled(1 / 64)
    found = tally.Tally(site, 0.0).result()
    found |= {"utilisation": utilisation, "tokens_per_s_p5": speed, "tpot_ms_p99": 30.0, "gpus": 24}
    found["gaps"] |= {"share": 0.97, "left_gpu_s": 100, "lent_gpu_s": 97}
    found["ttft_ms"] = {"p50": 60.0, "p95": p95, "p99": 300.0}
    return found


def found(**full: float) -> dict[str, Any]:
    everybody = {name: result(0.7, 260.0) for name in policies.POLICIES}
    return {
        "policies": everybody | {"full": result(**full)},
        "convergence": {"1/64": result(0.5), "1/32": result(0.78), "1/16": result(0.8)},
        "chat_platform": {"full": result()},
        "ten_minutes": {"full scale": result(), "1/16": result()},
        "traces": {"azure-code full": result()},
        "wall_s": 60,
    }


def test_goals_are_met_and_missed() -> None:
    assert all(simulation.verdict(found()).values())
    assert not simulation.verdict(found(utilisation=0.5))["utilisation"]
    assert not simulation.verdict(found(utilisation=0.5))["no_worse_than_any"]
    assert not simulation.verdict(found(p95=600.0))["ttft"]
    assert not simulation.verdict(found(speed=39.0))["speed"]
    unlent = found()
    unlent["policies"]["full"]["gaps"] = {"share": 0.94}
    assert not simulation.verdict(unlent)["gaps"]
    same = simulation.verdict(found(utilisation=0.7, p95=260.0))
    assert simulation.verdict(found(utilisation=0.7, p95=260.0, speed=47.0))["better_on_one"]
    assert same["no_worse_than_any"]
    assert not same["better_on_one"]


def test_the_two_largest_factors_are_compared() -> None:
    apart = simulation.converged(found()["convergence"])
    assert apart["utilisation"] == round(0.02 / 0.8, 4)


def test_the_page_holds_every_policy_and_every_goal() -> None:
    data = found()
    data["apart"] = simulation.converged(data["convergence"])
    data["goals"] = simulation.verdict(data)
    page = simulation_report.page(data, "simulation.png", "a machine")
    for name in policies.POLICIES:
        assert f"| {name} |" in page
    assert "**no**" not in page


def test_a_part_that_was_kept_is_not_run_again(tmp_path: Path) -> None:
    part = simulation.Part("traces", "azure-code full", "azure-code", "full", 1.0, hours=0.002)
    first = simulation.kept(tmp_path, part)
    (tmp_path / part.file).write_text(json.dumps(({**first[1], "requests": -1}, [])))
    assert simulation.kept(tmp_path, part)[1]["requests"] == -1
    assert first[1]["requests"] >= 0


def test_the_suite_has_three_factors_all_policies_and_full_scale() -> None:
    parts = simulation.parts(quick=False)
    assert {p.factor for p in parts if p.group in {"convergence", "policies"}} >= set(
        simulation.FACTORS
    )
    assert {p.name for p in parts if p.group == "policies"} == set(policies.POLICIES)
    assert any(p.factor == 1.0 and p.where == "large-site" for p in parts)
    assert all(p.site().fleet.gpus for p in parts)
