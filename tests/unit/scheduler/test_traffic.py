"""Which part of a model's traffic is a version's: by percent, by length, or copies."""

import dataclasses

import pytest

from scheduler.contracts import fleet, observed
from scheduler.core import (
    actions,
    autoscale,
    floors,
    lending,
    members,
    plan,
    snapshot,
    targets,
    traffic,
)
from scheduler.runtime import settings
from tests.unit.scheduler import plans

KIND = snapshot.Traffic
OPTIONS = settings.Settings(scale_fill=1.0)


def version(
    name: str, kind: KIND = KIND.PERCENT, share: float = 1.0, **bounds: float
) -> snapshot.Deployment:
    """Return a scaled version of `chat` whose replicas take ten requests each."""
    base = plans.deployment()
    spec = dataclasses.replace(base.spec, version=name)
    scaling = autoscale.Scaling(concurrency=10, share=share)
    scaling = dataclasses.replace(scaling, **bounds)  # type: ignore[arg-type] # the test's own
    return dataclasses.replace(base, spec=spec, scaling=scaling, traffic=kind)


def asked(
    waiting: int, in_flight: int, oldest_s: float = 0.0, **versions: observed.VersionDemand
) -> dict[str, observed.Demand]:
    tier = "interactive"
    found = observed.Demand("chat", {tier: waiting}, {tier: in_flight}, oldest_s, (), 0)
    return {"chat": dataclasses.replace(found, versions=versions)}


BASE, LONG, COPY = version("v1"), version("long", KIND.POOL), version("v2", KIND.SHADOW, 0.25)
SNAP = plans.picture(
    deployments=(BASE, LONG, COPY),
    demand=asked(
        12,
        40,
        9.0,
        v1=observed.VersionDemand(2, 36, 0.5),
        long=observed.VersionDemand(10, 4, 9.0),
    ),
    rates={"chat": 10.0},
    version_rates={("chat", "v1"): 8.0, ("chat", "long"): 2.0},
)


def needs(snap: snapshot.Snapshot) -> dict[str, targets.Target]:
    found = targets.decide(snap, OPTIONS, members.counted(snap)).of
    return {name: target for (_, name), target in found.items()}


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        # What the pool takes is not v1's, neither its requests nor the wait of the first of them.
        (BASE, traffic.Part(2, 36, 0.5, 8.0, 0.8)),
        (LONG, traffic.Part(10, 4, 9.0, 2.0, 0.2)),
        # A quarter of what runs at v1 is copied; copies wait for nothing.
        (COPY, traffic.Part(0, 9, 0.0, 2.0, 0.2)),
        (version("v1", share=0.5), traffic.Part(1, 18, 0.5, 4.0, 0.4)),
    ],
)
def test_each_version_has_its_part(deployment: snapshot.Deployment, expected: traffic.Part) -> None:
    found = traffic.part(SNAP, deployment)
    assert dataclasses.replace(found, of_model=round(found.of_model, 9)) == expected


def test_where_no_gateway_tells_versions_the_whole_is_everybodys() -> None:
    snap = plans.picture(deployments=(BASE,), demand=asked(3, 5, 1.0), rates={"chat": 4.0})
    assert traffic.part(snap, BASE) == traffic.Part(3, 5, 1.0, 4.0, 1.0)
    assert traffic.part(plans.picture(), LONG) == traffic.Part(0, 0, 0.0, None, 0.0)


def test_pools_and_shadows_grow_with_what_comes_to_them_and_with_nothing_else() -> None:
    found = needs(SNAP)
    assert (found["v1"].need, found["long"].need, found["v2"].need) == (4, 2, 1)
    quiet = dataclasses.replace(SNAP, demand=asked(0, 36, v1=observed.VersionDemand(0, 36)))
    found = needs(dataclasses.replace(quiet, version_rates={}))
    assert (found["v1"].need, found["long"].need, found["v2"].need) == (4, 0, 1)
    long = asked(10, 30, 9.0, long=observed.VersionDemand(10, 30, 9.0))
    found = needs(dataclasses.replace(SNAP, demand=long, rates={}, version_rates={}))
    assert (found["v1"].need, found["long"].need, found["v2"].need) == (0, 4, 0)


def test_batch_and_schedules_go_where_the_percents_do() -> None:
    snap = dataclasses.replace(
        SNAP,
        demand={},
        gpus=400,
        backlogs={"chat": lending.Backlog(1e6)},
        scheduled=(floors.Floor("morning", "chat", 3, -10.0, 3600.0),),
    )
    found = needs(snap)
    assert found["v1"].lent > 0
    assert (found["long"].lent, found["v2"].lent) == (0, 0)
    assert (found["v1"].need, found["long"].need, found["v2"].need) == (3, 0, 0)
    halves = (version("v1", share=0.5), version("v2", share=0.5), version("v3", share=0.0))
    found = needs(dataclasses.replace(snap, deployments=halves))
    assert [found[name].need for name in ("v1", "v2", "v3")] == [2, 2, 0]
    assert found["v1"].lent > 0
    assert found["v2"].lent > 0
    assert found["v3"].lent == 0, "no line of a batch comes to a version without a percent"


def test_what_still_answers_is_not_stopped_with_its_version() -> None:
    """After a drain's time an answer was cut, and no other version can go on with it."""
    busy, idle = (plans.known(number, plans.slot(number)) for number in (1, 2))
    stats = fleet.ReplicaStats(at_us=1, seats=8, interactive=1)
    busy = dataclasses.replace(busy, replica=dataclasses.replace(busy.replica, stats=stats))
    snap = plans.picture(
        deployments=(version("v1", share=0.0),),
        leases=tuple(plans.held(number) for number in (1, 2)),
        replicas=(busy, idle),
    )
    assert needs(snap)["v1"].need == 1
    assert needs(dataclasses.replace(snap, replicas=(idle,)))["v1"].need == 0
    # Without bounds of its own it is asked for in no replica at all; an admin's own zero is obeyed.
    for share, pinned, kept in ((0.0, False, 1), (0.0, True, 0), (1.0, False, 0)):
        gone = dataclasses.replace(plans.deployment(replicas=0), share=share, pinned=pinned)
        found = dataclasses.replace(snap, deployments=(gone,))
        assert needs(found)["v1"].need == kept
        stops = plan.plan(found, OPTIONS).actions
        assert [act.replica_id for act in stops if isinstance(act, actions.StopReplica)] == [
            each.replica.replica_id for each in (idle, busy)[: 2 - kept]
        ]


@pytest.mark.parametrize(
    ("replicas", "pinned", "share", "expected"),
    [
        (1, False, 1.0, 3),
        (1, False, 0.4, 2),
        (1, False, 0.0, 1),
        (4, False, 1.0, 4),
        (1, True, 1.0, 1),
        (0, False, 1.0, 0),
    ],
)
def test_a_schedule_counts_for_a_fixed_number_too_but_not_for_an_admins(
    replicas: int, pinned: bool, share: float, expected: int
) -> None:
    """A version has its percent of it, and nothing of it where the route does not name it."""
    fixed = dataclasses.replace(plans.deployment(replicas=replicas), pinned=pinned, share=share)
    snap = plans.picture(
        deployments=(fixed,), scheduled=(floors.Floor("morning", "chat", 3, 100.0, 3600.0),)
    )
    assert needs(snap)["v1"].need == expected
    if expected > replicas:
        assert needs(snap)["v1"].reason == f"schedule morning: floor {expected}"
        asks = plan.plan(snap, OPTIONS).actions
        assert len(asks) == expected
