"""What batch got of the GPU time that callers left over: the arithmetic, and sites that show it."""

import dataclasses

import pytest

from scheduler.core import sizing
from scheduler.sim import engine, gaps, run, scenario

STEP = sizing.StepTime(7.0, 0.0333, 0.03, 3.9e-5)


def made() -> engine.Engine:
    return engine.Engine(
        STEP, kv_tokens=100_000, seats=64, chunk=512, itl_s=0.02, shape=engine.BatchShape(500, 100)
    )


def test_lent_over_left_with_starts_and_time_without_work_apart() -> None:
    books = gaps.Gaps()
    books.starting(50.0)
    books.left(90.0, lent=True, work=True, cause="")
    books.left(6.0, lent=False, work=True, cause="idle")
    books.left(4.0, lent=False, work=True, cause="not held")
    books.left(70.0, lent=False, work=False, cause="idle")
    assert books.result() == {
        "left_gpu_s": 100,
        "lent_gpu_s": 90,
        "share": 0.9,
        "start_gpu_s": 50,
        "no_work_gpu_s": 70,
        "unlent_gpu_s": {"idle": 6, "not held": 4},
    }
    assert gaps.Gaps().result()["share"] is None


def test_callers_need_their_part_of_the_promised_step_and_no_more() -> None:
    one = made()
    assert one.spare == 1.0
    one.add(engine.Call(0, 0.0, 100, 100, 50), 0.0)
    one.pop(one.next_at)  # its prompt is computed: from here on it decodes alone
    alone = 1 - (7.0 + 0.03 + 3.9e-5 * (100 + 25)) / 20
    assert one.spare == pytest.approx(alone, abs=0.02)
    one.set_feed("shared", one.at)
    assert one.batch > 0
    assert one.spare == pytest.approx(
        alone, abs=0.02
    )  # what batch takes of it is not callers' need


def site(*models: scenario.Model) -> scenario.Scenario:
    fleet = scenario.Fleet(gpus=8, gpus_per_node=4, mtbf_node_h=1e9, start_s=(20, 40))
    traffic = scenario.Traffic(peak_rps=4, day_requests=4 * 86400 / 3, prompt=500, output=60)
    return scenario.Scenario("gaps", fleet, traffic, models, start_hour=13, hours=0.2)


SHAPE = sizing.Shape(32, 8, 128, 2, 16)
CHAT = scenario.Model("chat", SHAPE, STEP, share=1.0)
JUDGE = scenario.Model("judge", SHAPE, STEP, floor=0, batch=scenario.Batch(share=4.0))


def test_what_callers_leave_goes_to_batch_and_with_it_to_other_models() -> None:
    result, books = run.simulate(site(CHAT, JUDGE), "full")
    found = result["gaps"]
    assert found["no_work_gpu_s"] == 0
    assert 0 < found["lent_gpu_s"] <= found["left_gpu_s"] < 8 * books.counted_s
    both = dataclasses.replace(CHAT, batch=scenario.Batch(share=4.0))
    shared, _ = run.simulate(site(both, JUDGE), "full")
    assert shared["gaps"]["share"] >= 0.95
    apart, _ = run.simulate(site(both, JUDGE), "static")
    assert apart["gaps"]["share"] < shared["gaps"]["share"]


def test_where_there_is_no_batch_nothing_was_left_to_lend() -> None:
    result, _ = run.simulate(site(CHAT), "full")
    assert result["gaps"]["share"] is None
    assert result["gaps"]["no_work_gpu_s"] > 0
