"""Short simulations: what must hold whatever the policy, and that the planner is the broker's."""

import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import fleet
from scheduler.core import actions, plan, sizing
from scheduler.runtime import settings
from scheduler.sim import commands, pair, policies, run, scenario, tally, traffic, world

SMALL = sizing.Shape(32, 8, 128, 2, 16)
LARGE = sizing.Shape(80, 8, 128, 2, 70, gpus=4)
STEP = sizing.StepTime(7.0, 0.0333, 0.03, 3.9e-5)


def site(**changes: Any) -> scenario.Scenario:
    batch = scenario.Batch(share=0.5)
    base = scenario.Scenario(
        "test",
        scenario.Fleet(gpus=16, other_gpus=8, mtbf_node_h=0.5, start_s=(20, 40), repair_s=300),
        scenario.Traffic(peak_rps=12, day_requests=12 * 86400 / 3, prompt=500, output=60),
        (
            scenario.Model("large", LARGE, STEP, share=0.4, batch=batch),
            scenario.Model("small", SMALL, STEP, share=0.6),
            scenario.Model("judge", SMALL, STEP, floor=0, batch=batch),
        ),
        start_hour=13,
        hours=0.1,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("policy", list(policies.POLICIES))
def test_every_request_ends_and_no_gpu_is_counted_twice(policy: str) -> None:
    result, books = run.simulate(site(), policy)
    assert result["requests"] > 1000
    assert result["availability_min"] > 0.99
    assert 0.1 < result["utilisation"] <= 1.05
    assert 0.3 < result["busy"] <= 1.0
    whole = site().fleet.gpus * books.counted_s
    spent = sum(mine.busy_s for mine in books.models) + sum(books.waste.values())
    # Beside these there are only leases that overlap, and drains in which streams still end.
    assert spent <= (whole + books.overlap_s) * 1.02 + books.waste["drain"]
    assert spent >= whole * 0.97


def test_streams_of_a_node_that_fails_go_on_elsewhere_and_no_request_is_lost() -> None:
    def after(mtbf_node_h: float) -> dict[str, Any]:
        base = site(hours=0.05)
        fleet = dataclasses.replace(base.fleet, mtbf_node_h=mtbf_node_h, repair_s=60)
        return run.simulate(dataclasses.replace(base, fleet=fleet), "full")[0]

    calm, rough = after(1e9), after(0.1)
    # What is in flight at the end, some two seconds of 12 requests/s, is in neither's figures.
    assert abs(rough["requests"] - calm["requests"]) < 24
    assert rough["resumed"] > calm["resumed"]
    assert rough["availability_min"] > 0.99
    assert rough["waste_gpu_s"]["cold_start"] > calm["waste_gpu_s"]["cold_start"]


def test_the_same_seed_gives_the_same_day_and_another_one_does_not() -> None:
    first, _ = run.simulate(site(hours=0.03), "full")
    again, _ = run.simulate(site(hours=0.03), "full")
    other, _ = run.simulate(site(hours=0.03, seed=2), "full")
    assert first == again
    assert first != other


def test_plans_are_made_by_the_core_and_keep_to_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"plans": 0}
    real = plan.plan

    def watched(snap: Any, options: Any) -> plan.Plan:
        seen["plans"] += 1
        for held in snap.leases:
            assert sum(slot.gpus for slot in held.slots) <= held.lease.gpus
        made = real(snap, options)
        total = sum(
            target.total * {d.key: d.spec.gpus for d in snap.deployments}[key]
            for key, target in made.wanted.items()
        )
        assert total <= snap.gpus
        assert all(action.reason for action in made.actions if hasattr(action, "reason"))
        return made

    monkeypatch.setattr(plan, "plan", watched)
    run.simulate(site(hours=0.05), "full")
    assert seen["plans"] > 30


def test_defaults_of_the_planner_are_those_of_the_broker() -> None:
    broker = settings.Settings()
    chosen = {
        "rungs",
        "start_timeout_s",
    }  # each policy's own; a cold start of five minutes is no failure
    for field in dataclasses.fields(policies.Planner):
        if field.name not in chosen:
            assert getattr(policies.Planner(), field.name) == getattr(broker, field.name), (
                field.name
            )


def test_batch_overflows_to_the_cluster_that_has_room_and_none_is_lost() -> None:
    late = scenario.Batch(share=20.0, deadline_h=0.2, submit_hours=(0.0,))
    full = dataclasses.replace(
        site(), models=(dataclasses.replace(site().models[1], share=1.0, batch=late),)
    )
    idle = dataclasses.replace(
        full, models=(dataclasses.replace(full.models[0], batch=scenario.Batch()),)
    )
    full, idle = (dataclasses.replace(each, hours=0.06) for each in (full, idle))
    done = pair.simulate((full, idle), "full")
    assert done["moves"]
    assert {move["target"] for move in done["moves"]} == {"test-2"}
    assert done["clusters"]["test-2"]["batch_tokens"] > 0
    apart = pair.simulate((full, idle), "full", overflows=False)
    assert not apart["moves"]
    assert apart["clusters"]["test-2"]["batch_tokens"] == 0


def test_the_command_runs_two_clusters_side_by_side() -> None:
    out, err = io.StringIO(), io.StringIO()
    argv = ["large-site", "--beside", "azure-conversation", "--factor", "0.02", "--hours", "0.01"]
    assert commands.simulate_main(argv, out=out, err=err) == 0, err.getvalue()
    told = json.loads(out.getvalue())
    assert set(told) == {"overflow", "apart"}
    assert len(told["overflow"]["clusters"]) == 2
    assert told["apart"]["moves"] == []
    assert commands.simulate_main([*argv[:2], "nowhere"], out=out, err=err) == 1


def test_a_partition_fits_the_fleet() -> None:
    here = world.World(
        site(), policies.POLICIES["static"], policies.Planner(), 0.0, tally.Tally(site(), 0.0)
    )
    parts = run.partition(site(), here)
    sizes = [model.shape.gpus for model in site().models]
    assert sum((a + b) * size for (a, b), size in zip(parts.values(), sizes, strict=True)) <= 16


@pytest.mark.parametrize("name", ["azure_llm_2023_conv.csv", "azure_llm_2023_code.csv"])
def test_traces_are_read_whole(name: str) -> None:
    rows = traffic.read(scenario.SHIPPED / name)
    assert len(rows) == {"azure_llm_2023_conv.csv": 19_366, "azure_llm_2023_code.csv": 8_819}[name]
    assert 3_400 < max(row.at_s for row in rows) < 3_510
    assert min(row.at_s for row in rows) == 0


def test_a_cut_last_line_of_a_trace_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "head.jsonl"
    row = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text(f'{json.dumps(row)}\n{json.dumps(row)}\n{{"timestamp": 60')
    rows = traffic.read(path)
    assert [row.cached for row in rows] == [0, 700]
    assert rows[0].at_s == 3.0


def test_the_command_prints_figures_and_json(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    argv = ["azure-conversation", "--hours", "0.004", "--factor", "0.1"]
    assert (
        commands.simulate_main([*argv, "--plot", str(tmp_path / "day.png")], out=out, err=err) == 0
    )
    assert "TTFT p50/p95/p99" in out.getvalue()
    assert (tmp_path / "day.png").stat().st_size > 1000
    out = io.StringIO()
    names = ",".join(policies.POLICIES)
    assert set(policies.POLICIES) == {
        "static", "slurm_preemption", "no_forecast", "lease_only", "full",
    }  # fmt: skip
    argv += ["--policy", names, "--json"]
    assert commands.simulate_main(argv, out=out, err=err) == 0
    told = json.loads(out.getvalue())["policies"]
    assert told.keys() == set(names.split(","))
    for one in told.values():
        assert {
            "utilisation", "ttft_ms", "tpot_ms_p99", "tokens_per_s_p5", "availability_min",
            "batch_deadlines_met", "tokens_per_gpu_hour", "waste_gpu_s",
        } <= one.keys()  # fmt: skip
        assert one["ttft_ms"].keys() == {"p50", "p95", "p99"}
        assert {"cold_start", "idle", "drain", "recompute", "not_held"} == one["waste_gpu_s"].keys()
    assert commands.simulate_main(["azure-code", "--policy", "magic"], out=out, err=err) == 1
    assert "no such policy" in err.getvalue()


NO_NUMBERS = """\
--hours nan
--hours inf
--hours 0
--start-hour nan
--start-hour -1
--factor nan
--factor 2
--policy ,
--policy , --beside azure-code"""


@pytest.mark.parametrize("words", NO_NUMBERS.splitlines())
def test_what_is_no_number_or_no_policy_is_refused_in_a_line(words: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert commands.simulate_main(["azure-code", *words.split()], out=out, err=err) == 1
    assert err.getvalue().startswith("forebay simulate: error: --")
    assert words.split(maxsplit=1)[0] in err.getvalue()
    assert err.getvalue().count("\n") == 1


def test_a_parked_replica_wakes_faster_than_it_starts() -> None:
    here = world.World(
        site(), policies.POLICIES["full"], policies.Planner(), 0.0, tally.Tally(site(), 0.0)
    )
    assert here._wake_s(0) == pytest.approx(2 + 70 / 4 / 25)
    assert fleet.ReplicaState.ASLEEP


@pytest.mark.slow
def test_roles_and_leases_do_not_thrash_where_leases_live_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Roles flipped every tick: the plan that stopped one replica lent another one. Calm goes first."""
    apart = policies.Policy((0, 1, 3), forecast=False, what="as the broker's defaults")
    monkeypatch.setitem(policies.POLICIES, "apart", apart)
    turned: dict[str, list[tuple[float, str]]] = {}
    asked = 0
    real = plan.plan

    def watched(snap: Any, options: Any) -> plan.Plan:
        nonlocal asked
        made = real(snap, options)
        asked += sum(isinstance(a, actions.RequestLease) for a in made.actions)
        stopped = {a.replica_id for a in made.actions if isinstance(a, actions.StopReplica)}
        for action in made.actions:
            if isinstance(action, actions.SetRole):
                assert action.replica_id not in stopped
                turned.setdefault(action.replica_id, []).append((snap.now, action.role))
        return made

    monkeypatch.setattr(plan, "plan", watched)
    base = site(hours=0.3)
    rough = dataclasses.replace(
        base.traffic, peak_rps=20, day_requests=20 * 86400 / 3, spikes=400, spike_factor=3.0
    )
    models = tuple(
        dataclasses.replace(model, batch=scenario.Batch(share=0.5)) for model in base.models
    )
    calm = dataclasses.replace(base.fleet, mtbf_node_h=1e9)
    result, _ = run.simulate(
        dataclasses.replace(base, fleet=calm, models=models, traffic=rough), "apart"
    )
    assert turned
    lent_again = [
        later - before
        for turns in turned.values()
        for (before, _), (later, role) in itertools.pairwise(turns)
        if role == fleet.Role.BATCH  # callers are given what they need at once
    ]
    assert lent_again
    assert min(lent_again) >= policies.Planner().calm_s, sorted(lent_again)[:5]
    assert asked == 10, "each once: leases do not come and go"
    assert result["gaps"]["share"] >= 0.95
    assert result["availability_min"] > 0.999


def test_first_tokens_beside_batch_come_within_a_tenth_of_those_without() -> None:
    """Batch fills what callers leave of each step, and their p95 stays within 1.1 of its quiet value."""
    chat = scenario.Model("chat", SMALL, STEP, share=1.0, batch=scenario.Batch(share=2.0))
    filled = dataclasses.replace(
        site(),
        fleet=scenario.Fleet(gpus=8, start_s=(20, 40)),
        hours=0.03,
        traffic=scenario.Traffic(peak_rps=12, day_requests=12 * 86400 / 3, prompt=2000, output=100),
        models=(chat,),
    )
    quiet = dataclasses.replace(filled, models=(dataclasses.replace(chat, batch=scenario.Batch()),))
    beside, _ = run.simulate(filled, "full")
    alone, _ = run.simulate(quiet, "full")
    assert beside["batch_tokens"] > 100_000
    assert alone["batch_tokens"] == 0
    assert beside["requests"] == pytest.approx(alone["requests"], rel=0.02)  # some still run
    assert beside["ttft_ms"]["p95"] <= 1.1 * alone["ttft_ms"]["p95"]
