"""Whatever the snapshot: no GPU twice, nothing too many, and planning again asks for nothing."""

import collections
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import actions, replicas, snapshot
from tests.unit.scheduler import plans

MODELS = ("chat", "code", "embed")
LEASE_STATES = [state for state in fleet.LeaseState if state is not fleet.LeaseState.ENDED]
REPLICA_STATES = [state for state in fleet.ReplicaState if not replicas.replica_final(state)]


@st.composite
def leases(draw: st.DrawFn, number: int) -> snapshot.HeldLease:
    gpus = draw(st.integers(0, 8))
    slots = []
    free = gpus
    for which in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, 4))
        state = draw(st.sampled_from(list(replicas.SlotState)))
        if size > free and not state.final:
            continue
        free -= 0 if state.final else size
        base = plans.slot(number, which, size)
        slots.append(dataclasses.replace(base, state=state, close=draw(st.booleans())))
    return snapshot.HeldLease(
        lease=plans.lease(number, draw(st.sampled_from(LEASE_STATES)), gpus),
        slots=tuple(slots),
        silent_s=draw(st.sampled_from([None, 0.1, 4.0, 7.0, 40.0])),
        held_s=draw(st.sampled_from([0.0, 20.0, 90.0])),
        idle_s=draw(st.sampled_from([0.0, 20.0, 90.0])),
        absent_polls=draw(st.integers(0, 4)),
        leaving=draw(st.sampled_from(["", "", "sigterm"])),
        fresh=draw(st.booleans()),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> snapshot.Snapshot:
    held = tuple(draw(leases(number)) for number in range(1, draw(st.integers(1, 5))))
    found = []
    for number, slot in enumerate(
        [slot for lease in held for slot in lease.slots if not slot.state.final], start=1
    ):
        if draw(st.booleans()):
            item = plans.known(
                number, slot, draw(st.sampled_from(MODELS)), draw(st.sampled_from(REPLICA_STATES))
            )
            found.append(
                dataclasses.replace(
                    item,
                    run=draw(st.booleans()),
                    drain_asked=draw(st.booleans()),
                    missing_s=draw(st.sampled_from([0.0, 9.0])),
                    wanted_role=draw(st.sampled_from(list(fleet.Role))),
                )
            )
    jobs = None
    if draw(st.booleans()):
        states = draw(st.lists(st.sampled_from(list(slurm.JobState)), max_size=7))
        jobs = tuple(plans.job(number, state) for number, state in enumerate(states, start=1))
    wanted = tuple(
        dataclasses.replace(
            plans.deployment(model, draw(st.integers(0, 4)), draw(st.integers(0, 4))),
            role=draw(st.sampled_from(list(fleet.Role))),
            hold_batch=draw(st.booleans()),
        )
        for model in MODELS
        if draw(st.booleans())
    )
    return plans.picture(
        leases=held,
        replicas=tuple(found),
        jobs=jobs,
        deployments=wanted,
        settling=draw(st.booleans()),
    )


def check_gpus(snap: snapshot.Snapshot) -> None:
    """No lease's open slots hold more GPUs than it has, and no slot has two replicas."""
    for lease in snap.leases:
        taken = sum(slot.gpus for slot in lease.slots if not slot.state.final)
        assert taken <= lease.lease.gpus, lease
    held = {lease.lease.lease_id for lease in snap.leases}
    counts = collections.Counter(
        known.replica.slot_id for known in snap.replicas if known.replica.lease_id in held
    )
    assert all(count == 1 for count in counts.values()), counts


@settings(deadline=None)
@given(snapshots())
def test_no_gpu_is_given_twice(snap: snapshot.Snapshot) -> None:
    world = plans.World(snap)
    for _ in range(3):
        world.apply(world.think())
        check_gpus(world.snap)


@settings(deadline=None)
@given(snapshots())
def test_applied_and_planned_again_nothing_is_asked_for(snap: snapshot.Snapshot) -> None:
    world = plans.World(snap)
    for _ in range(6):  # what one plan frees (a lost replica's slot), the next may use
        made = world.think()
        world.apply(made)
        if not made.actions:
            break
    assert world.think().actions == ()


@settings(deadline=None)
@given(snapshots())
def test_never_more_starts_than_are_wanted(snap: snapshot.Snapshot) -> None:
    made = plans.World(snap).think()
    starts = collections.Counter(
        action.spec.model for action in made.actions if isinstance(action, actions.StartReplica)
    )
    asked = sum(isinstance(action, actions.RequestLease) for action in made.actions)
    wanted = {item.spec.model: item.replicas for item in snap.deployments}
    assert all(count <= wanted.get(model, 0) for model, count in starts.items())
    assert asked <= sum(wanted.values())
    if snap.settling or snap.jobs is None:
        assert asked == 0
    if snap.settling:
        assert not starts


@settings(deadline=None)
@given(snapshots())
def test_nothing_ends_without_slurms_word_or_silence(snap: snapshot.Snapshot) -> None:
    made = plans.World(snap).think()
    held = {lease.lease.lease_id: lease for lease in snap.leases}
    named: dict[ids.LeaseId, bool] = {}
    for job in snap.jobs or ():
        assert job.stamp is not None
        named[job.stamp.lease_id] = job.state.final
    for action in made.actions:
        if isinstance(action, actions.FollowLease) and action.event is replicas.LeaseEvent.ENDED:
            lease = held[action.lease_id]
            assert snap.jobs is not None
            if not named.get(action.lease_id, False):
                assert action.lease_id not in named
                assert lease.absent_polls >= 3
                assert lease.silent_s is None or lease.silent_s > 5.0
        if isinstance(action, actions.CancelJob):
            assert snap.jobs is not None
