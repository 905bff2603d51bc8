"""Under demand that stays as it is plans come to rest, whatever Slurm gives, and what fits is there then."""

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import fleet, observed
from scheduler.core import snapshot
from scheduler.runtime import settings as runtime_settings
from tests.properties import test_elastic
from tests.unit.scheduler import obedient

ROUNDS = 80
QUIET = 4  # rounds without an action
LEAST = 20  # of a tenth given up at a time, and of waits between
RUNGS = [(0, 1, 3), (0, 1, 2, 3), (0, 3), (3,)]
STUCK = [(), (fleet.LeaseKind.SERVE,), (fleet.LeaseKind.BACKFILL,)]


@st.composite
def worlds(draw: st.DrawFn) -> snapshot.Snapshot:
    """Return a site at any moment: leases of any kind, half full, too much or too little of everything."""
    snap = draw(test_elastic.pictures())
    gpus = draw(st.sampled_from([16, 24, 40, 64]))
    held = [dataclasses.replace(each, left_s=math.inf) for each in snap.leases]
    while sum(each.lease.gpus for each in held) > gpus:
        held.pop()
    there = {each.lease.lease_id for each in held}
    return dataclasses.replace(
        snap,
        gpus=gpus,
        leases=tuple(held),
        jobs=tuple(obedient.job_of(each) for each in held),
        replicas=tuple(known for known in snap.replicas if known.replica.lease_id in there),
        closures=(),
        scheduled=(),
        rates={},
        demand={
            each.spec.model: observed.Demand(
                each.spec.model, {}, {"interactive": draw(st.integers(0, 60))}
            )
            for each in snap.deployments
        },
        deployments=tuple(
            dataclasses.replace(
                each,
                scaling=dataclasses.replace(each.scaling, concurrency=8.0, requests_per_s=0.0),
            )
            for each in snap.deployments
            if each.scaling is not None
        ),
    )


@settings(max_examples=max(200, settings().max_examples), deadline=None)
@given(worlds(), st.sampled_from(RUNGS), st.sampled_from(STUCK), st.sampled_from([1.0, 0.75]))
def test_plans_come_to_rest_and_what_fits_is_there(
    snap: snapshot.Snapshot,
    rungs: tuple[int, ...],
    stuck: tuple[fleet.LeaseKind, ...],
    part: float,
) -> None:
    """Slurm may have less than the site says, or start no lease of one kind: no ask is made again and again.

    A lease of batch was given back as it came and asked for again, for as long as a serve lease waited.
    """
    options = dataclasses.replace(runtime_settings.Settings(), rungs=rungs)
    world = obedient.Obedient(snap, options, round(snap.gpus * part), stuck)
    quiet = 0
    for number in range(ROUNDS):
        made = world.round(100.0)
        quiet = 0 if made.actions else quiet + 1
        if number >= LEAST and quiet >= QUIET:
            break
    else:
        raise AssertionError(f"still at it: {[action.reason for action in made.actions]}")
    sizes = {each.key: each.spec.gpus for each in snap.deployments}
    fits = sum(each.total * sizes[key] for key, each in made.wanted.items()) <= snap.gpus
    # Where leases live apart nothing is moved to make a hole, and room in a serve lease is none for batch.
    if fits and 2 in rungs and part == 1.0 and not stuck:
        there = world.awake()
        assert {key: there.get(key, 0) for key in sizes} == {
            key: each.total for key, each in made.wanted.items()
        }
