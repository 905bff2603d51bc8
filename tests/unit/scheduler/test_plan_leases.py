"""The planner's decisions on leases: what follows Slurm, what is adopted, cancelled and given back."""

import dataclasses

import pytest

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import actions, backoff, plan, replicas
from tests.unit.scheduler import plans
from tests.unit.scheduler.plans import deployment, do, held, job, known, picture, slot


def test_leases_that_nothing_needs_are_given_back() -> None:
    leases = (
        held(1, fleet.LeaseState.PENDING, silent_s=None),
        dataclasses.replace(held(2), idle_s=31.0),
        dataclasses.replace(held(3), idle_s=29.0),
        dataclasses.replace(held(4, silent_s=20.0), idle_s=31.0),
    )
    closed = [
        action.lease_id
        for action in do(picture(leases=leases))
        if isinstance(action, actions.CloseLease)
    ]
    assert closed == [leases[0].lease.lease_id, leases[1].lease.lease_id]


def test_refused_asks_are_paused_with_the_reason() -> None:
    snap = picture(
        deployments=(deployment(),), lease_pause=backoff.Failures(1, 1004.0, "invalid account")
    )
    made = plan.plan(snap, plans.OPTIONS)
    assert made.actions == ()
    assert made.notes == ("chat v1: next lease asked for in 4.0 s: invalid account",)


@pytest.mark.parametrize(
    ("state", "of_job", "event"),
    [
        (fleet.LeaseState.REQUESTED, slurm.JobState.PENDING, replicas.LeaseEvent.QUEUED),
        (fleet.LeaseState.REQUESTED, slurm.JobState.RUNNING, replicas.LeaseEvent.RAN),
        (fleet.LeaseState.PENDING, slurm.JobState.RUNNING, replicas.LeaseEvent.RAN),
        (fleet.LeaseState.PENDING, slurm.JobState.PENDING, None),
        (fleet.LeaseState.RUNNING, slurm.JobState.RUNNING, None),
        (fleet.LeaseState.RUNNING, slurm.JobState.COMPLETING, None),
        (fleet.LeaseState.RUNNING, slurm.JobState.PENDING, replicas.LeaseEvent.QUEUED),
        (fleet.LeaseState.RUNNING, slurm.JobState.NODE_FAIL, replicas.LeaseEvent.ENDED),
        (fleet.LeaseState.UNKNOWN, slurm.JobState.RUNNING, replicas.LeaseEvent.RAN),
        (fleet.LeaseState.CLOSING, slurm.JobState.COMPLETED, replicas.LeaseEvent.ENDED),
    ],
)
def test_leases_follow_slurm(
    state: fleet.LeaseState, of_job: slurm.JobState, event: replicas.LeaseEvent | None
) -> None:
    snap = picture(leases=(held(1, state),), jobs=(job(1, of_job),), settling=True)
    news = [action.event for action in do(snap) if isinstance(action, actions.FollowLease)]
    assert news == ([] if event is None else [event])
    old = dataclasses.replace(snap, leases=(dataclasses.replace(held(1, state), fresh=False),))
    assert [a for a in do(old) if isinstance(a, actions.FollowLease)] == []


def test_absence_makes_unknown_and_ends_only_with_a_silent_agent_after_some_polls() -> None:
    def news(**changes: object) -> list[replicas.LeaseEvent]:
        lease = dataclasses.replace(held(1), **changes)  # type: ignore[arg-type] # own fields
        snap = picture(leases=(lease,), settling=True)
        return [action.event for action in do(snap) if isinstance(action, actions.FollowLease)]

    unknown = plans.lease(1, fleet.LeaseState.UNKNOWN)
    assert news(absent_polls=0) == []
    assert news(absent_polls=1) == [replicas.LeaseEvent.VANISHED]
    assert news(lease=unknown, absent_polls=9) == []  # its agent speaks
    assert news(lease=unknown, absent_polls=2, silent_s=60.0) == []  # too few polls
    assert news(lease=unknown, absent_polls=3, silent_s=60.0) == [replicas.LeaseEvent.ENDED]
    assert news(lease=unknown, absent_polls=3, silent_s=None) == [replicas.LeaseEvent.ENDED]
    assert news(
        lease=plans.lease(1, fleet.LeaseState.REQUESTED), absent_polls=3, silent_s=None
    ) == [replicas.LeaseEvent.ENDED]


def test_stamped_jobs_are_adopted_and_those_of_ended_leases_cancelled() -> None:
    jobs = (
        job(1),
        job(2, slurm.JobState.PENDING),
        job(3, slurm.JobState.COMPLETED),
        job(4, cluster="beta"),
        job(5),
    )
    snap = picture(jobs=jobs, ended=frozenset({plans.lease(5).lease_id}), settling=True)
    found = do(snap)
    assert [action.job.job_id for action in found if isinstance(action, actions.AdoptLease)] == [
        "1",
        "2",
    ]
    assert [action.job_id for action in found if isinstance(action, actions.CancelJob)] == ["5"]
    again = dataclasses.replace(snap, cancels={ids.SlurmJobId("5"): 1.0})
    assert [a for a in do(again) if isinstance(a, actions.CancelJob)] == []


def test_a_closing_leases_job_is_cancelled_if_its_agent_does_not_leave() -> None:
    def cancelled(**changes: object) -> bool:
        lease = dataclasses.replace(held(1, fleet.LeaseState.CLOSING), **changes)  # type: ignore[arg-type] # own fields
        found = do(picture(leases=(lease,), jobs=(job(1),)))
        return [type(action) for action in found] == [actions.CancelJob]

    assert not cancelled(held_s=20.0)
    assert cancelled(held_s=36.0)
    assert cancelled(silent_s=None)
    assert cancelled(silent_s=6.0)
    # In a backfill lease nothing is drained, unless its replica had turned and callers stream there.
    backfill = dataclasses.replace(
        held(1, fleet.LeaseState.CLOSING).lease, kind=fleet.LeaseKind.BACKFILL
    )
    assert not cancelled(lease=backfill, held_s=9.0)
    assert cancelled(lease=backfill, held_s=11.0)
    closing = dataclasses.replace(
        held(1, fleet.LeaseState.CLOSING), lease=backfill, slots=(slot(),), held_s=11.0
    )
    base = known(1, slot())
    stats = fleet.ReplicaStats(0, seats=8, interactive=1)
    streams = dataclasses.replace(base, replica=dataclasses.replace(base.replica, stats=stats))
    found = do(picture(leases=(closing,), jobs=(job(1),), replicas=(streams,)))
    assert not any(isinstance(action, actions.CancelJob) for action in found)


def test_leases_without_an_agent_are_given_back() -> None:
    def closed(**changes: object) -> list[str]:
        lease = dataclasses.replace(held(1), **changes)  # type: ignore[arg-type] # own fields
        found = do(picture(leases=(lease,), jobs=(job(1),)))
        return [action.reason for action in found if isinstance(action, actions.CloseLease)]

    assert closed(silent_s=None, held_s=59.0) == []
    assert closed(silent_s=None, held_s=61.0) == ["no agent came within 60 s: see the lease's log"]
    assert closed(silent_s=29.0) == []
    assert closed(silent_s=31.0) == ["agent silent for 31 s"]
