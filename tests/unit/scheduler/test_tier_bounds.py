"""Bounds of each tier: floors, minimums and maximums of interactive, standard and batch in one model."""

import dataclasses

import pytest

from scheduler.contracts import observed
from scheduler.core import autoscale, lending, snapshot, targets, traffic
from tests.unit.scheduler import plans

KEY = ("chat", "v1")


def need(
    bounds: dict[str, int], signal: autoscale.Signal, before: autoscale.Memory | None = None
) -> autoscale.Need:
    scaling = autoscale.Scaling(concurrency=10, **bounds)
    return autoscale.need(scaling, signal, before, 0.0, plans.ELASTIC)


def asked(held: int, standard: float = 0.0) -> autoscale.Signal:
    """Return ``held`` requests in flight; seven fill a replica (10 at once, 0.7 of it planned for)."""
    return autoscale.Signal(in_flight=held, standard=standard)


@pytest.mark.parametrize(
    ("bounds", "signal", "replicas", "reason"),
    [
        ({}, asked(70, 0.3), 10, "70 requests in flight or waiting"),
        ({"standard_maximum": 3}, asked(70, 0.3), 10, "70 requests in flight or waiting"),
        (
            {"standard_maximum": 2},
            asked(70, 0.3),
            9,
            "standard_maximum 2, though 10 would be needed",
        ),
        (
            {"interactive_maximum": 4},
            asked(70),
            4,
            "interactive_maximum 4, though 10 would be needed",
        ),
        (
            {"interactive_maximum": 4, "standard_maximum": 2},
            asked(140, 0.5),
            6,
            "interactive_maximum 4 and standard_maximum 2, though 20 would be needed",
        ),
        (
            {"interactive_maximum": 8, "standard_maximum": 8, "maximum": 12},
            asked(140, 0.5),
            12,
            "maximum 12, though 20 would be needed",
        ),
        ({"interactive_floor": 2, "standard_floor": 1}, asked(0), 3, "floor 3"),
        ({"interactive_floor": 2, "standard_floor": 1, "floor": 5}, asked(0), 5, "floor 5"),
        # A part of a replica of one tier and the floor of the other: they share, and the sum is rounded up.
        ({"interactive_floor": 2}, asked(7, 0.5), 3, "3 by tiers' bounds"),
        ({"standard_minimum": 4}, asked(0), 0, "0 requests in flight or waiting"),
        ({"standard_minimum": 4}, asked(7, 1.0), 4, "minimum 4"),
    ],
)
def test_each_tier_is_held_within_its_bounds_and_the_bound_is_named(
    bounds: dict[str, int], signal: autoscale.Signal, replicas: int, reason: str
) -> None:
    found = need(bounds, signal)
    assert (found.replicas, found.reason) == (replicas, reason)


def test_a_minimum_holds_while_the_model_is_in_use_and_a_floor_always() -> None:
    scaling = autoscale.Scaling(concurrency=10, minimum=4, floor=1, idle_to_zero_s=900)
    memory: autoscale.Memory | None = None
    seen: dict[int, int] = {}
    for second in range(0, 3000, 30):
        signal = autoscale.Signal(serving=1, in_flight=1 if second < 60 else 0)
        found = autoscale.need(scaling, signal, memory, float(second), plans.ELASTIC)
        memory, seen[second] = found.memory, found.replicas
    assert {seen[second] for second in range(0, 900, 30)} == {4}
    assert seen[2970] == 1


def test_the_forecast_and_the_rate_are_split_by_who_comes_and_not_by_who_stays() -> None:
    scaling = autoscale.Scaling(concurrency=10, requests_per_s=10, standard_maximum=1)
    signal = autoscale.Signal(in_flight=7, standard=1.0, rate=70.0, standard_rate=0.0)
    assert autoscale.need(scaling, signal, None, 0.0, plans.ELASTIC).replicas == 10
    signal = dataclasses.replace(signal, standard_rate=0.5)
    assert autoscale.need(scaling, signal, None, 0.0, plans.ELASTIC).replicas == 6
    signal = dataclasses.replace(signal, rate=0.0, outlook=70.0)
    assert autoscale.need(scaling, signal, None, 0.0, plans.ELASTIC).replicas == 6


def test_the_part_of_tier_standard_is_told_by_requests_and_by_rate() -> None:
    demand = observed.Demand(
        "chat", {"interactive": 1}, {"standard": 2, "interactive": 1, "batch": 9}
    )
    snap = plans.picture(demand={"chat": demand})
    assert traffic.of_standard(snap, "chat") == (0.5, 0.5)
    snap = dataclasses.replace(snap, rates={"chat": 8.0}, standard_rates={"chat": 2.0})
    assert traffic.of_standard(snap, "chat") == (0.5, 0.25)
    assert traffic.of_standard(snap, "other") == (0.0, 0.0)


def _site(batch: dict[str, int], held: int, hold: bool = False) -> snapshot.Snapshot:
    scaling = autoscale.Scaling(concurrency=10, floor=1, **batch)
    deployment = dataclasses.replace(
        plans.deployment(replicas=0, gpus=1), scaling=scaling, hold_batch=hold
    )
    return plans.picture(
        gpus=8,
        deployments=(deployment,),
        demand={"chat": observed.Demand("chat", {}, {"interactive": held})},
    )


@pytest.mark.parametrize(
    ("batch", "held", "hold", "need", "lent"),
    [
        ({}, 70, False, 8, 0),
        ({"batch_floor": 2}, 70, False, 6, 2),
        ({"batch_floor": 2}, 14, False, 2, 2),  # warm without a line of work
        ({"batch_minimum": 2}, 14, False, 2, 0),
        ({"batch_floor": 2}, 70, True, 8, 0),  # held by an admin
        ({"batch_floor": 20}, 70, False, 1, 7),  # the callers' own floor goes before
    ],
)
def test_batch_has_its_floor_though_callers_would_need_it(
    batch: dict[str, int], held: int, hold: bool, need: int, lent: int
) -> None:
    found = targets.decide(_site(batch, held, hold), plans.ELASTIC, {})
    assert (found.of[KEY].need, found.of[KEY].lent) == (need, lent)
    if "batch_floor" in batch and held == 70 and not hold:
        assert f"{lent} of them batch's floor" in found.notes[0]


def test_of_one_in_quarantine_no_floor_is_kept_free() -> None:
    snap = _site({"batch_floor": 2, "batch_minimum": 3}, 14)
    (only,) = snap.deployments
    other = dataclasses.replace(
        only,
        spec=dataclasses.replace(only.spec, model="other"),
        quarantined_until_us=snap.now_us + 1,
        quarantine_reason="its engine does not start",
    )
    busy = {name: observed.Demand(name, {}, {"interactive": 70}) for name in ("chat", "other")}
    both = dataclasses.replace(snap, deployments=(only, other), demand=busy)
    found = targets.decide(both, plans.ELASTIC, {}).of
    assert (found[KEY].need, found[KEY].lent) == (6, 2)
    assert (found["other", "v1"].need, found["other", "v1"].lent) == (0, 0)


def test_a_minimum_of_batch_is_kept_while_there_is_work_and_goes_last() -> None:
    work = lending.Backlog(1e6)
    small = lending.Want(("a", "v1"), 1, lending.Backlog(700.0), minimum=3)
    large = lending.Want(("b", "v1"), 1, work, current=8)
    assert lending.lend(8, [small, large])["a", "v1"] == 3
    idle = dataclasses.replace(small, backlog=lending.Backlog(0.0), current=3)
    assert lending.lend(8, [idle, large]) == {("a", "v1"): 0, ("b", "v1"): 8}
    kept = lending.Want(("a", "v1"), 1, lending.Backlog(0.0), floor=2)
    assert lending.lend(3, [kept, large]) == {("a", "v1"): 2, ("b", "v1"): 1}
