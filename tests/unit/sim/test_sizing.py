"""Sizing by the issue's own figures, and what a scenario file may not say."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import sizing
from scheduler.sim import commands, plan, scenario

SMALL = sizing.Shape(32, 8, 128, 2, 16)
LARGE = sizing.Shape(80, 8, 128, 2, 70, gpus=4)


def test_kv_cache_of_the_two_reference_models() -> None:
    assert SMALL.kv_bytes == 128 * 1024
    assert SMALL.kv_tokens == 442_504
    assert LARGE.kv_bytes == 320 * 1024


def test_weights_that_do_not_fit_leave_no_cache() -> None:
    assert sizing.Shape(32, 8, 128, 2, weights_gb=90).kv_tokens == 0


@pytest.mark.parametrize(
    ("name", "about", "within"), [("chat-8b", 350, 20), ("chat-70b", 1000, 110)]
)
def test_the_plan_of_the_large_site_is_near_the_simple_count(
    name: str, about: int, within: int
) -> None:
    site = scenario.load(scenario.find("large-site"))
    plain = dataclasses.replace(site, traffic=dataclasses.replace(site.traffic, cached=0.0))
    row = next(row for row in plan.rows(plain) if row.model == name)
    assert abs(row.gpus_peak - about) <= within
    assert abs(row.reference_gpus - about) <= within


@given(
    st.floats(1, 20), st.floats(0.005, 0.2), st.floats(0, 0.2), st.floats(1e-6, 1e-4),
    st.floats(10, 8000), st.floats(2, 2000), st.floats(0, 0.9), st.floats(5, 45),
    st.integers(1, 512), st.integers(9_000, 900_000),
)  # fmt: skip
def test_a_replica_at_its_capacity_gives_each_stream_its_speed(
    a: float, b: float, c: float, d: float, prompt: float, output: float, cached: float,
    speed: float, seats: int, kv: int,
) -> None:  # fmt: skip
    step = sizing.StepTime(a, b, c, d)
    load = sizing.Load(prompt, output, cached)
    found = sizing.capacity(step, load, kv_tokens=kv, seats=seats, tokens_per_s=speed)
    assert found.requests_per_s > 0
    prefill = found.requests_per_s * load.computed * b / 1000
    got = (1 - prefill) / (found.step_ms / 1000)
    assert got * 1.0001 >= speed
    assert found.sequences <= seats * 1.0001
    assert found.sequences * (prompt + output) <= kv * 1.0001 or found.sequences <= 1.0001
    if found.bound == "speed":
        assert got == pytest.approx(speed, rel=1e-6)


def test_a_day_adds_up() -> None:
    traffic = scenario.load(scenario.find("large-site")).traffic
    day = sum(traffic.curve(second) for second in range(0, 86_400, 60)) * 60
    assert day == pytest.approx(traffic.day_requests, rel=1e-3)
    assert traffic.curve(14 * 3600) == pytest.approx(traffic.peak_rps)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "[[models]]: at least one"),
        ("[fleet]\ngpus = 'x'\n[[models]]\nname='a'", "shape: layers is missing"),
        ("x = [", "Invalid value"),
        (
            "[fleet]\ngpuz = 3\n[[models]]\nname='a'\nshape={layers=1,kv_heads=1,head_dim=1,"
            "value_bytes=1,weights_gb=1}\nstep={base=1,prefill=1,decode=1,kv=1}",
            "[fleet]: gpuz: no such key",
        ),
        (
            "name='n'\n[fleet]\ngpus=-1\n[[models]]\nname='a'\nshape={layers=1,kv_heads=1,"
            "head_dim=1,value_bytes=1,weights_gb=1}\nstep={base=1,prefill=1,decode=1,kv=1}",
            "finite number from 0",
        ),
    ],
)
def test_a_bad_scenario_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    out, err = io.StringIO(), io.StringIO()
    assert commands.plan_main([str(path)], out=out, err=err) == 1
    assert says in err.getvalue()
    assert str(path) in err.getvalue()
    assert len(err.getvalue().splitlines()) == 1


def test_plan_as_json_and_text() -> None:
    out, err = io.StringIO(), io.StringIO()
    assert commands.plan_main(["large-site", "--json"], out=out, err=err) == 0
    data = json.loads(out.getvalue())
    assert data["gpus"]["reference"] == pytest.approx(1411, abs=1)
    assert data["why_it_differs"]
    out = io.StringIO()
    assert commands.plan_main(["large-site"], out=out, err=err) == 0
    for formula in plan.FORMULAS:
        assert formula in out.getvalue()


@pytest.mark.parametrize("name", ["large-site", "chat-platform"])
def test_a_scaled_site_keeps_its_proportions(name: str) -> None:
    site = scenario.load(scenario.find(name))
    for factor in (1.0, 0.5, 0.25, 1 / 16):
        small = site.scaled(factor)
        assert small.fleet.gpus % site.fleet.gpus_per_node == 0
        load = small.traffic.peak_rps / small.fleet.gpus
        assert load == pytest.approx(site.traffic.peak_rps / site.fleet.gpus)
        assert small.traffic.night() == pytest.approx(site.traffic.night())
