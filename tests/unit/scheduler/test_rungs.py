"""Rungs 1 and 3 together: a role that turns is not taken back, and a lease is not given up for nothing.

Each trace is what a real cluster showed before the rule that it tests was there.
"""

import dataclasses
import math
from collections.abc import Sequence

import pytest

from scheduler.contracts import fleet, observed, slurm
from scheduler.core import actions, asks, autoscale, backoff, lending, plan, snapshot
from scheduler.runtime import settings
from tests.unit.scheduler import plans

OPTIONS = settings.Settings()  # rungs 0, 1 and 3: serve and backfill leases live apart
POOLED = dataclasses.replace(OPTIONS, rungs=(0, 1, 2, 3))
ONE_JOB = {"chat": lending.Backlog(1e6, math.inf, 100)}
TWO_JOBS = ONE_JOB | {"judge": lending.Backlog(1e6, math.inf, 100)}
SERVE, BACKFILL = fleet.LeaseKind.SERVE, fleet.LeaseKind.BACKFILL


def house(
    number: int,
    kind: fleet.LeaseKind,
    model: str = "chat",
    role: fleet.Role | None = None,
    interactive: int = 0,
) -> tuple[snapshot.HeldLease, snapshot.KnownReplica]:
    """Return a lease that is full with one serving replica."""
    slot = plans.slot(number)
    base = plans.held(number)
    lease = dataclasses.replace(base.lease, kind=kind)
    known = plans.known(number, slot, model)
    stats = fleet.ReplicaStats(0, seats=8, interactive=interactive, batch=8 - interactive)
    told = role or (fleet.Role.SHARED if kind is SERVE else fleet.Role.BATCH)
    return dataclasses.replace(base, lease=lease, slots=(slot,)), dataclasses.replace(
        known,
        replica=dataclasses.replace(known.replica, stats=stats),
        stats_age_s=0.1,
        wanted_role=told,
        age_s=5000.0,
    )


def scaled(model: str = "chat", **bounds: float) -> snapshot.Deployment:
    scaling = autoscale.Scaling(concurrency=8, batch_maximum=1, **bounds)  # type: ignore[arg-type] # counts
    return dataclasses.replace(plans.deployment(model, 1), scaling=scaling)


def picture(
    houses: Sequence[tuple[snapshot.HeldLease, snapshot.KnownReplica]],
    callers: int,
    **parts: object,
) -> snapshot.Snapshot:
    held = [lease for lease, _ in houses]
    base: dict[str, object] = {
        "leases": tuple(held),
        "replicas": tuple(known for _, known in houses),
        "jobs": tuple(
            plans.job(int(lease.lease.slurm_job_id)) for lease in held if lease.lease.slurm_job_id
        ),
        "deployments": (scaled(floor=1, maximum=2),),
        "gpus": 4 * len(houses),
        "backlogs": ONE_JOB,
        "scale_memory": {
            ("chat", "v1"): autoscale.Memory(1),
            ("judge", "v1"): autoscale.Memory(0),
        },
        "demand": {
            "chat": observed.Demand("chat", {}, {"interactive": callers}),
            "judge": observed.Demand("judge", {}, {}),
        },
    }
    return plans.picture(**(base | parts))


def names(made: plan.Plan) -> list[str]:
    return [
        f"{type(a).__name__} {a.role}" if isinstance(a, actions.SetRole) else type(a).__name__
        for a in made.actions
    ]


def test_a_need_that_an_own_batch_replica_covers_turns_it_and_takes_no_lease() -> None:
    """The lease was closed and asked for anew in the plan that turned its replica's role."""
    snap = picture([house(1, SERVE), house(2, BACKFILL)], callers=9)
    made = plan.plan(snap, OPTIONS)
    assert names(made) == ["SetRole shared"]
    assert made.wanted["chat", "v1"].borrowed == 1
    # The next plan, with the role turned, leaves everything as it is, and so do those after the spike.
    turned = [house(1, SERVE), house(2, BACKFILL, role=fleet.Role.SHARED)]
    memory: dict[str, object] = {}
    for tick in range(1, 20):
        callers = 9 if tick < 4 else 1
        snap = picture(turned, callers, now=1000.0 + 0.2 * tick, **memory)
        made = plan.plan(snap, OPTIONS)
        assert not made.actions
        memory = {"ladder_memory": made.ladder_memory, "scale_memory": made.scale_memory}
    # Only when less has been enough for long does batch get it back.
    made = plan.plan(picture(turned, 1, now=1003.0 + OPTIONS.scale_down_s, **memory), OPTIONS)
    assert names(made) == ["SetRole batch"]


def test_a_batch_replica_that_does_not_turn_in_its_time_is_given_up_for_the_next_rung() -> None:
    """Rung 1 has a second; one that says batch long after that covers no need, and rung 3 begins."""
    lease, known = house(2, BACKFILL, role=fleet.Role.SHARED)
    slow = dataclasses.replace(
        known, replica=dataclasses.replace(known.replica, role=fleet.Role.BATCH), told_s=1.5
    )
    assert not plan.plan(picture([house(1, SERVE), (lease, slow)], 9), OPTIONS).actions
    stuck = dataclasses.replace(slow, told_s=6.0)
    made = plan.plan(picture([house(1, SERVE), (lease, stuck)], 9), OPTIONS)
    assert names(made) == ["StopReplica", "CloseLease", "RequestLease"]
    assert any("rung 1 missed its budget" in note for note in made.notes)
    # One that the agent says has turned by now is none of these, however long ago it was told.
    turned = dataclasses.replace(known, told_s=600.0)
    assert not plan.plan(picture([house(1, SERVE), (lease, turned)], 9), OPTIONS).actions


def test_a_need_beyond_the_own_batch_replica_takes_the_lease_of_another_models_batch() -> None:
    houses = [house(1, SERVE), house(2, BACKFILL), house(3, BACKFILL, "judge")]
    three = (scaled(floor=1, maximum=3), scaled("judge"))
    made = plan.plan(picture(houses, 15, deployments=three, backlogs=TWO_JOBS), OPTIONS)
    assert names(made) == ["SetRole shared", "StopReplica", "CloseLease", "RequestLease"]
    close = next(a for a in made.actions if isinstance(a, actions.CloseLease))
    assert close.lease_id == houses[2][0].lease.lease_id
    # Slurm preempts for the new lease by itself, and took the one whose replica had just turned.
    ask = next(a for a in made.actions if isinstance(a, actions.RequestLease))
    assert ask.exclude == houses[1][0].lease.nodes
    # One replica more is rung 1's alone, though both have batch work: judge keeps its lease.
    made = plan.plan(picture(houses, 9, deployments=three, backlogs=TWO_JOBS), OPTIONS)
    assert names(made) == ["SetRole shared"]


def test_an_ask_that_has_not_got_what_was_freed_for_it_may_have_another_by_preemption() -> None:
    """Somebody else was faster on the freed node: it kept away from all others and waited for ever."""
    waiting = plans.held(3, fleet.LeaseState.PENDING)
    houses = [house(1, SERVE), house(2, BACKFILL)]
    three = (scaled(floor=2, maximum=2),)

    def asked(held_s: float, exclude: tuple[str, ...]) -> list[actions.Action]:
        lease = dataclasses.replace(waiting.lease, exclude=exclude, nodes=())
        coming = dataclasses.replace(waiting, lease=lease, held_s=held_s)
        snap = picture(houses, 1, deployments=three)
        snap = dataclasses.replace(
            snap,
            leases=(*snap.leases, coming),
            jobs=(*(snap.jobs or ()), plans.job(3, slurm.JobState.PENDING)),
            gpus=12,
        )
        made = plan.plan(snap, OPTIONS).actions
        mine = waiting.lease.lease_id
        return [
            each
            for each in made
            if isinstance(each, actions.RequestLease)
            or (isinstance(each, actions.CloseLease) and each.lease_id == mine)
        ]

    kept = houses[1][0].lease.nodes
    close, ask = asked(asks.PATIENCE_S + 1, kept)
    assert isinstance(close, actions.CloseLease)
    assert isinstance(ask, actions.RequestLease)
    assert ask.exclude == ()
    assert not asked(asks.PATIENCE_S - 1, kept)  # Slurm takes a while to give freed GPUs
    assert not asked(asks.PATIENCE_S + 1, ())
    assert not asked(asks.PATIENCE_S + 1, ("n9",))  # cordoned then: nothing of ours is there


def test_a_floor_stands_in_leases_that_slurm_protects() -> None:
    houses = [house(1, SERVE), house(2, BACKFILL)]
    two = (scaled(floor=2, maximum=2),)
    made = plan.plan(picture(houses, 1, deployments=two), OPTIONS)
    assert {"CloseLease", "RequestLease"} <= set(names(made))


def test_what_stops_takes_its_share_of_the_roles_along() -> None:
    """One of two was lent to batch while the plan stopped the other: the next one took it back, 0.2 s on."""
    stay, go = house(1, SERVE, interactive=2), house(2, SERVE)
    memory = {("chat", "v1"): autoscale.Memory(2, since=0.0)}
    snap = picture([stay, go], 1, now=2000.0, scale_memory=memory)
    made = plan.plan(snap, OPTIONS)
    assert "StopReplica" in names(made)
    assert not any(isinstance(action, actions.SetRole) for action in made.actions)


def test_where_leases_are_shared_a_stop_and_a_loan_in_one_plan_agree() -> None:
    """Three replicas, one needed, one lent: the one that stops is not the one that batch gets."""
    houses = [house(n, SERVE, interactive=n == 1) for n in (1, 2, 3)]
    memory = {("chat", "v1"): autoscale.Memory(2, since=0.0)}
    snap = picture(houses, 1, now=2000.0, scale_memory=memory)
    made = plan.plan(snap, POOLED)
    stopped = {a.replica_id for a in made.actions if isinstance(a, actions.StopReplica)}
    lent = {a.replica_id for a in made.actions if isinstance(a, actions.SetRole)}
    assert len(stopped) == len(lent) == 1
    assert not stopped & lent
    # Applied, nothing is left to do.
    left = [
        (lease, dataclasses.replace(known, wanted_role=fleet.Role.BATCH))
        if known.replica.replica_id in lent
        else (lease, known)
        for lease, known in houses
        if known.replica.replica_id not in stopped
    ]
    after = {"scale_memory": made.scale_memory, "ladder_memory": made.ladder_memory}
    made = plan.plan(picture(left, 1, now=2000.2, gpus=8, **after), POOLED)
    assert not any(isinstance(action, actions.SetRole) for action in made.actions)


def test_only_what_is_in_a_backfill_lease_is_lent_where_leases_live_apart() -> None:
    """A new serve replica was lent in place of the one whose lease batch has."""
    houses = [house(1, SERVE), house(2, SERVE), house(3, BACKFILL, role=fleet.Role.SHARED)]
    snap = picture(houses, 9)
    made = plan.plan(snap, OPTIONS)
    assert names(made) == ["SetRole batch"]
    assert made.actions[0].replica_id == houses[2][1].replica.replica_id  # type: ignore[union-attr] # a SetRole


@pytest.mark.parametrize("why", ["quarantined", "failed", "in Slurm's queue", "refused"])
def test_a_lease_that_has_just_come_for_batch_is_not_taken_for_what_can_not_start_now(
    why: str,
) -> None:
    """It was given back as soon as it came and asked for again, for as long as the other could not start."""
    empty = house(2, BACKFILL)[0]
    leases = [house(1, SERVE)[0], dataclasses.replace(empty, slots=())]
    jobs = [plans.job(1), plans.job(2)]
    chat, parts = scaled(floor=2, maximum=2), dict[str, object]()
    if why == "quarantined":
        chat = dataclasses.replace(chat, quarantined_until_us=2**60, quarantine_reason="broken")
    elif why == "failed":
        parts["failures"] = {chat.key: backoff.Failures(1, 2000.0, "no weights")}
    elif why == "refused":
        parts["lease_pause"] = backoff.Failures(1, 2000.0, "QOSMaxGRESPerUser")
    else:
        leases.append(plans.held(3, fleet.LeaseState.PENDING))
        jobs.append(plans.job(3, slurm.JobState.PENDING))
    snap = picture([house(1, SERVE)], 1, gpus=12, deployments=(chat, scaled("judge")), **parts)
    snap = dataclasses.replace(
        snap,
        leases=tuple(leases),
        jobs=tuple(jobs),
        backlogs={"judge": TWO_JOBS["judge"]},
    )
    made = plan.plan(snap, OPTIONS)
    (start,) = made.actions
    assert isinstance(start, actions.StartReplica)
    assert (start.lease_id, start.spec.model) == (empty.lease.lease_id, "judge")


def test_the_gpus_of_what_is_in_quarantine_are_lent_until_it_may_start_again() -> None:
    """They stood empty for as long as the quarantine lasted, and again for its own batch work."""
    judge = dataclasses.replace(scaled("judge"), scaling=autoscale.Scaling(concurrency=8))
    chat = dataclasses.replace(
        scaled(floor=1), quarantined_until_us=2**60, quarantine_reason="no weights"
    )
    snap = picture([house(2, BACKFILL, "judge")], 0, gpus=8, backlogs=TWO_JOBS)
    snap = dataclasses.replace(snap, deployments=(chat, judge))
    made = plan.plan(snap, OPTIONS)
    assert (made.wanted["chat", "v1"].total, made.wanted["judge", "v1"].lent) == (0, 2)
    assert made.wanted["chat", "v1"].reason == "0 of 1, quarantined: no weights"
    assert "chat v1: quarantined: no weights" in made.notes
    assert names(made) == ["RequestLease"]
    over = dataclasses.replace(chat, quarantined_until_us=0)
    made = plan.plan(dataclasses.replace(snap, deployments=(over, judge)), OPTIONS)
    assert (made.wanted["chat", "v1"].need, made.wanted["judge", "v1"].lent) == (1, 1)
    # Batch gets no more of it than what is there.
    resting = dataclasses.replace(judge, quarantined_until_us=2**60, quarantine_reason="no weights")
    made = plan.plan(dataclasses.replace(snap, deployments=(chat, resting)), OPTIONS)
    assert made.wanted["judge", "v1"].lent == 1
    # One that serves still is kept, and counts.
    there = dataclasses.replace(snap, leases=(*snap.leases, house(1, SERVE)[0]))
    there = dataclasses.replace(there, replicas=(*snap.replicas, house(1, SERVE)[1]))
    made = plan.plan(there, OPTIONS)
    assert (made.wanted["chat", "v1"].need, made.wanted["judge", "v1"].lent) == (1, 1)


def test_an_empty_backfill_lease_that_batch_does_not_need_is_taken_at_once() -> None:
    empty = house(2, BACKFILL)[0]
    leases = (house(1, SERVE)[0], dataclasses.replace(empty, slots=()))
    snap = picture([house(1, SERVE)], 1, gpus=8, deployments=(scaled(floor=2, maximum=2),))
    made = plan.plan(dataclasses.replace(snap, leases=leases), OPTIONS)
    assert names(made) == ["CloseLease", "RequestLease"]


def test_the_reason_of_a_role_says_that_batch_work_has_ended() -> None:
    houses = [house(1, SERVE), house(2, BACKFILL)]
    floor = (dataclasses.replace(scaled(floor=1, maximum=2), role=fleet.Role.SHARED),)
    made = plan.plan(picture(houses, 9, backlogs={}, deployments=floor), OPTIONS)
    roles = [a for a in made.actions if isinstance(a, actions.SetRole)]
    assert [a.reason for a in roles] == ["no batch work is left for it"]
