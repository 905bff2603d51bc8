"""Lifecycles: what is listed leads where the table says, everything else raises."""

import itertools

import pytest

from scheduler.contracts import fleet, slurm
from scheduler.core import replicas

R, E = fleet.ReplicaState, replicas.ReplicaEvent
L, F = fleet.LeaseState, replicas.LeaseEvent


@pytest.mark.parametrize(
    ("state", "event", "after"),
    [
        (R.STARTING, E.LOADED, R.WARM),
        (R.STARTING, E.SERVED, R.SERVING),
        (R.WARM, E.SERVED, R.SERVING),
        (R.SERVING, E.DRAINED, R.DRAINING),
        (R.DRAINING, E.STOPPED, R.STOPPED),
        (R.SERVING, E.FAILED, R.LOST),
        (R.ASLEEP, E.SERVED, R.SERVING),
        (R.STARTING, E.BARRED, R.QUARANTINED),
        (R.SERVING, E.VANISHED, R.LOST),
    ],
)
def test_replica_events(
    state: fleet.ReplicaState, event: replicas.ReplicaEvent, after: fleet.ReplicaState
) -> None:
    assert replicas.replica_after(state, event) is after


def test_unlisted_events_raise_and_final_states_stay() -> None:
    finals = {R.STOPPED, R.LOST, R.QUARANTINED}
    assert {state for state in R if replicas.replica_final(state)} == finals
    for state, event in itertools.product(finals, E):
        with pytest.raises(replicas.UnlistedEvent):
            replicas.replica_after(state, event)
    with pytest.raises(replicas.UnlistedEvent, match="served can't happen to what is draining"):
        replicas.replica_after(R.DRAINING, E.SERVED)
    for lease_event in F:
        with pytest.raises(replicas.UnlistedEvent):
            replicas.lease_after(L.ENDED, lease_event)


def test_every_state_has_a_row_and_every_open_one_can_end() -> None:
    assert set(replicas.REPLICA) == set(R)
    assert set(replicas.LEASE) == set(L)
    for state in R:
        if not replicas.replica_final(state):
            assert replicas.replica_after(state, E.VANISHED) is R.LOST
    for lease_state in L:
        if lease_state is not L.ENDED:
            assert replicas.lease_after(lease_state, F.ENDED) is L.ENDED


def test_absence_never_ends_a_lease() -> None:
    for state in L:
        if replicas.lease_lists(state, F.VANISHED):
            assert replicas.lease_after(state, F.VANISHED) is L.UNKNOWN
    assert replicas.of_job(slurm.JobState.UNKNOWN) is F.VANISHED


def test_what_a_job_state_means_for_its_lease() -> None:
    assert replicas.of_job(slurm.JobState.PENDING) is F.QUEUED
    assert replicas.of_job(slurm.JobState.RUNNING) is F.RAN
    assert replicas.of_job(slurm.JobState.COMPLETING) is None
    assert replicas.of_job(slurm.JobState.SUSPENDED) is None
    for state in slurm.JobState:
        if state.final:
            assert replicas.of_job(state) is F.ENDED


def test_every_reported_state_has_an_event_that_leads_there() -> None:
    for state in R:
        event = replicas.reported(state)
        found = {row[event] for row in replicas.REPLICA.values() if event in row}
        assert found == {state}


def test_what_is_unknown_can_be_told_to_be_anything_and_anything_unknown() -> None:
    for state in R:
        assert replicas.replica_after(R.UNKNOWN, replicas.reported(state)) is state
        if not replicas.replica_final(state):
            assert replicas.replica_after(state, E.UNREAD) is R.UNKNOWN
    assert R("hovering") is R.UNKNOWN
    assert replicas.SlotState("hovering") is replicas.SlotState.UNKNOWN
