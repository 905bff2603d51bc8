"""What the autoscaler is told: bounds from the configuration, measured starts, requests a second."""

import dataclasses
from typing import Any

import pytest

from scheduler.contracts import clock, fleet, observed
from scheduler.core import autoscale, rollouts, snapshot
from scheduler.runtime import arrivals, config, entries, live, scaling, settings, snapshots

KEY = ("chat", "v1")


def test_bounds_are_read_and_measured_starts_put_in() -> None:
    bounds = scaling.from_mapping({"floor": 2, "maximum": 8, "park_gb": 16.5})
    assert bounds == autoscale.Scaling(floor=2, maximum=8, park_gb=16.5)
    starts = scaling.Starts()
    assert starts.applied(KEY, bounds) == bounds
    for seconds in (100.0, 120.0, 600.0):
        starts.note(KEY, {"load": seconds}, woken=False)
    starts.note(KEY, {"allocate": 1.0, "load": 2.0}, woken=True)
    measured = starts.applied(KEY, bounds)
    assert (measured.start_s, measured.wake_s, measured.floor) == (120.0, 3.0, 2)
    assert starts.applied(("other", "v1"), bounds) == bounds


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"flor": 1}, "scaling.flor is unknown: one of floor, minimum, maximum"),
        ({"floor": -1}, "scaling.floor = -1: must be a whole number from 0"),
        ({"floor": 1.5}, "scaling.floor = 1.5: must be a whole number from 0"),
        ({"floor": True}, "scaling.floor = True: must be a whole number"),
        ({"park_gb": "16G"}, "scaling.park_gb = '16G': must be a number from 0"),
        ({"start_s": 3}, "scaling.start_s is unknown"),
        ({"floor": 4, "maximum": 3}, "scaling.floor 4 exceeds maximum 3"),
        ({"batch_floor": 4, "batch_maximum": 3}, "scaling.batch_floor 4 exceeds batch_maximum 3"),
        (
            {"standard_minimum": 2, "standard_maximum": 1},
            "scaling.standard_minimum 2 exceeds standard_maximum 1",
        ),
        (
            {"interactive_floor": 2, "standard_floor": 2, "maximum": 3},
            "scaling.interactive_floor 2 and standard_floor 2 together exceed maximum 3",
        ),
    ],
)
def test_bad_bounds_say_which(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault.replace("(", r"\(")):
        config.ModelSettings(name="chat", engine=fleet.EngineKind.SIMULATED, scaling=given)


def test_rates_are_of_the_last_minute_and_add_up_over_gateways() -> None:
    rates = arrivals.Rates[str]()
    for second in range(0, 121, 1):
        rates.note("g1", "chat", second * 10, float(second))
        rates.note("g2", "chat", second * 5, float(second))
    assert rates.per_s() == {"chat": pytest.approx(15.0)}
    for second in range(121, 200):
        rates.note("g1", "chat", 1_200, float(second))
    rates.forget("g2")
    assert rates.per_s() == {"chat": pytest.approx(0.0)}


def test_a_counter_that_went_back_is_a_new_process() -> None:
    rates = arrivals.Rates[str]()
    rates.note("g1", "chat", 1_000_000, 0.0)
    rates.note("g1", "chat", 3, 10.0)
    rates.note("g1", "chat", 13, 20.0)
    assert rates.per_s() == {"chat": 1.0}


def test_the_picture_says_how_requests_come_to_each_version_and_how_many() -> None:
    picture = live.Live(1, "alpha", entries.Pauses(1.0, 60.0), 0.0)
    names = ("v1", "long", "v2", "old")
    picture.deployments = tuple(
        snapshot.Deployment(
            fleet.ReplicaSpec("chat", name, fleet.EngineKind.SIMULATED),
            1,
            scaling=autoscale.Scaling(),
        )
        for name in names
    )
    route = fleet.Route("chat", {"v1": 100}, pools=(fleet.Pool(100, "long", 8192),))
    picture.routes = {"chat": dataclasses.replace(route, shadow="v2", shadow_percent=10)}
    for arrived, gateway in ((0, "a"), (0, "b"), (30, "a"), (60, "b")):
        long = observed.VersionDemand(1, 2, arrived / 10, arrived)
        told = observed.Demand("chat", {}, {}, 0.0, (), 2 * arrived, versions={"long": long})
        picture.absorb_demand(gateway, {"chat": told}, 30.0 if arrived else 0.0)
    found = snapshots.collect(picture, clock.FakeClock(monotonic=30.0), settings.Settings())
    told_of = {each.spec.version: each for each in found.deployments}
    assert {name: told_of[name].traffic.value for name in names} == {
        "v1": "percent", "long": "pool", "v2": "shadow", "old": "percent",
    }  # fmt: skip
    shares = {name: one.scaling.share for name, one in told_of.items() if one.scaling}
    assert shares == {"v1": 1.0, "long": 1.0, "v2": 0.1, "old": 0.0}
    assert shares == {name: one.share for name, one in told_of.items()}
    assert found.demand["chat"].versions == {"long": observed.VersionDemand(2, 4, 6.0, 90)}
    assert found.rates["chat"] == pytest.approx(6.0)
    assert found.version_rates == {("chat", "long"): pytest.approx(3.0)}
    picture.rollouts = (rollouts.Rollout("chat", "long", {"v1": 100}, (10, 100), 60.0, "ada"),)
    found = snapshots.collect(picture, clock.FakeClock(monotonic=30.0), settings.Settings())
    assert found.deployments[1].traffic is snapshot.Traffic.PERCENT  # it may have to take all


def test_budgets_of_starts_leave_slurms_queue_out_and_know_wakes_from_starts() -> None:
    starts = scaling.Starts()
    assert starts.budget_s(KEY, woken=False) == 600.0  # nothing known: no start is late before that
    for _ in range(5):
        starts.note(KEY, {"queue": 900.0, "load": 20.0}, woken=False)
        starts.note(KEY, {"allocate": 1.0, "warm-up": 11.0}, woken=True)
    assert starts.budget_s(KEY, woken=False) == 40.0
    assert starts.budget_s(KEY, woken=True) == 24.0


def test_starts_of_what_is_not_deployed_any_more_are_forgotten() -> None:
    """Each version that ever was stayed in the fact that the leader writes every two seconds."""
    starts = scaling.Starts()
    for version in ("v1", "v2"):
        starts.note(("chat", version), {"load": 3.0}, woken=False)
        starts.note(("chat", version), {"load": 1.0}, woken=True)
    starts.keep(frozenset({("chat", "v2"), ("new", "v1")}))
    assert starts.told().keys() == {"chat v2"}
    assert starts.cold() == {("chat", "v2"): 3.0}
