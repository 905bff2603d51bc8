"""The planner's decisions, one situation each."""

import dataclasses

import pytest

from scheduler.contracts import fleet, observed, slurm
from scheduler.core import actions, backoff, plan, replicas, snapshot
from tests.unit.scheduler import plans
from tests.unit.scheduler.plans import deployment, do, held, job, known, picture, slot


def with_slots(
    lease: snapshot.HeldLease, *slots: snapshot.Slot, **changes: object
) -> snapshot.HeldLease:
    return dataclasses.replace(lease, slots=slots, **changes)  # type: ignore[arg-type] # own fields


def test_a_missing_replica_asks_for_a_lease_of_its_size() -> None:
    (action,) = do(picture(deployments=(deployment(gpus=2),)))
    assert action == actions.RequestLease(
        fleet.LeaseKind.SERVE, 2, "chat v1 needs 2 GPUs and no lease has them"
    )


def test_a_teams_own_floor_gets_leases_of_its_own_and_nobody_else_does() -> None:
    def of(team: str, number: int) -> snapshot.HeldLease:
        lease = held(number, fleet.LeaseState.RUNNING, gpus=4)
        return dataclasses.replace(lease, lease=dataclasses.replace(lease.lease, team=team))

    shared = deployment(gpus=2)
    spec = dataclasses.replace(shared.spec, model="own", dedicated="red")
    own = dataclasses.replace(shared, spec=spec)
    asked = do(picture(deployments=(own, shared)))
    assert [each.team for each in asked if isinstance(each, actions.RequestLease)] == ["red", ""]
    both = of("red", 1), of(plans.OPTIONS.lease_team, 2)
    started = do(picture(deployments=(own, shared), leases=both))
    assert [(each.spec.model, each.lease_id) for each in started] == [  # type: ignore[union-attr]
        ("own", both[0].lease.lease_id),
        ("chat", both[1].lease.lease_id),
    ]


def test_one_lease_for_each_gap_up_to_the_cap() -> None:
    made = plan.plan(picture(deployments=(deployment(replicas=9),)), plans.OPTIONS)
    assert [type(action) for action in made.actions] == [actions.RequestLease] * 4
    assert any("pending_leases" in note for note in made.notes)


def test_a_lease_on_its_way_is_not_asked_for_twice() -> None:
    for state in (fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING):
        waiting = held(1, state, silent_s=None)
        made = plan.plan(picture(deployments=(deployment(),), leases=(waiting,)), plans.OPTIONS)
        assert made.actions == ()
        assert "waits in Slurm's queue" in made.notes[0]
    coming = held(1, fleet.LeaseState.RUNNING, silent_s=None)
    made = plan.plan(picture(deployments=(deployment(),), leases=(coming,)), plans.OPTIONS)
    assert made.actions == ()
    assert "has not come yet" in made.notes[0]


def test_a_ready_lease_takes_the_replica_in_a_new_slot() -> None:
    (action,) = do(picture(deployments=(deployment(),), leases=(held(),)))
    assert isinstance(action, actions.StartReplica)
    assert (action.slot_id, action.role) == (None, fleet.Role.SHARED)
    assert action.reason == "1 of 1 replicas of chat v1 missing"


def test_an_empty_slot_of_the_same_size_is_used_again() -> None:
    lease = with_slots(held(gpus=8), slot(gpus=2), slot(which=1, gpus=4))
    (action,) = do(picture(deployments=(deployment(gpus=4),), leases=(lease,)))
    assert isinstance(action, actions.StartReplica)
    assert action.slot_id == slot(which=1).slot_id


def test_the_tightest_fit_keeps_large_holes_whole() -> None:
    leases = (held(1, gpus=4), held(2, gpus=2))
    (action,) = do(picture(deployments=(deployment(gpus=2),), leases=leases))
    assert isinstance(action, actions.StartReplica)
    assert action.lease_id == leases[1].lease.lease_id


def test_empty_slots_are_closed_to_make_room_and_the_replica_follows() -> None:
    small = (slot(gpus=2), slot(which=1, gpus=2))
    lease = with_slots(held(gpus=4), *small)
    snap = picture(deployments=(deployment(gpus=4),), leases=(lease,))
    found = do(snap)
    assert [type(action) for action in found] == [actions.CloseSlot] * 2
    closing = with_slots(lease, *(dataclasses.replace(item, close=True) for item in small))
    waiting = plan.plan(dataclasses.replace(snap, leases=(closing,)), plans.OPTIONS)
    assert waiting.actions == ()  # what closes is room that comes: no second lease is asked for it
    assert waiting.notes == (f"chat v1: slots of lease {lease.lease.lease_id} are closing",)
    closed = with_slots(
        lease, *(dataclasses.replace(item, state=replicas.SlotState.CLOSED) for item in small)
    )
    (action,) = do(dataclasses.replace(snap, leases=(closed,)))
    assert isinstance(action, actions.StartReplica)


def test_nothing_starts_on_the_gpus_of_a_slot_that_still_closes() -> None:
    lease = with_slots(held(gpus=2), slot(gpus=2))
    snap = picture(deployments=(deployment(replicas=2, gpus=1),), leases=(lease,))
    assert [type(action) for action in do(snap)] == [actions.CloseSlot]
    closing = with_slots(lease, dataclasses.replace(slot(gpus=2), close=True))
    assert do(dataclasses.replace(snap, leases=(closing,))) == []
    closed = with_slots(lease, dataclasses.replace(slot(gpus=2), state=replicas.SlotState.CLOSED))
    found = do(dataclasses.replace(snap, leases=(closed,)))
    assert [type(action) for action in found] == [actions.StartReplica] * 2


def test_nothing_is_started_while_the_broker_settles() -> None:
    snap = picture(deployments=(deployment(),), leases=(held(),), settling=True)
    assert do(snap) == []


def test_without_slurm_empty_slots_are_used_and_nothing_else_is_begun() -> None:
    lease = with_slots(held(gpus=8), slot())
    snap = picture(deployments=(deployment(replicas=2),), leases=(lease,), jobs=None)
    (action,) = do(snap)
    assert isinstance(action, actions.StartReplica)
    assert action.slot_id == slot().slot_id
    silent = dataclasses.replace(lease, silent_s=900.0)
    assert do(picture(leases=(silent,), jobs=None)) == []


def test_surplus_is_stopped_the_least_missed_first() -> None:
    slots = [slot(which=n) for n in range(4)]
    lease = with_slots(held(gpus=16), *slots)
    busy = dataclasses.replace(
        known(1, slots[0]).replica, stats=fleet.ReplicaStats(0, 8, interactive=3)
    )
    found = (
        dataclasses.replace(known(1, slots[0]), replica=busy),
        known(2, slots[1]),
        known(3, slots[2], state=fleet.ReplicaState.STARTING),
        known(4, slots[3]),
    )
    snap = picture(deployments=(deployment(replicas=1),), leases=(lease,), replicas=found)
    stopped = [action.replica_id for action in do(snap) if isinstance(action, actions.StopReplica)]
    assert stopped == [
        found[2].replica.replica_id,
        found[1].replica.replica_id,
        found[3].replica.replica_id,
    ]


def test_a_replica_in_a_leaving_lease_is_replaced_at_once() -> None:
    lease = with_slots(held(), slot(), leaving="sigterm")
    snap = picture(deployments=(deployment(),), leases=(lease,), replicas=(known(1, slot()),))
    assert [type(action) for action in do(snap)] == [actions.RequestLease]


def test_what_is_not_deployed_any_more_is_stopped() -> None:
    lease = with_slots(held(), slot())
    (action,) = do(picture(leases=(lease,), replicas=(known(1, slot()),)))
    assert isinstance(action, actions.StopReplica)
    assert action.reason == "chat v1 is not deployed any more"


def test_replicas_of_what_is_gone_are_written_off() -> None:
    lease = with_slots(
        held(2, gpus=12), dataclasses.replace(slot(2), state=replicas.SlotState.LOST)
    )
    missing = dataclasses.replace(known(3, slot(2, 1)), missing_s=6.0)
    snap = picture(leases=(lease,), replicas=(known(1, slot(1)), known(2, slot(2)), missing))
    reasons = {
        action.replica_id[-1]: action.reason
        for action in do(snap)
        if isinstance(action, actions.MarkLost)
    }
    assert reasons == {
        "1": f"lease {plans.lease(1).lease_id} has ended",
        "2": f"slot {slot(2).slot_id} is gone",
        "3": "its agent does not know it",
    }


def test_a_replica_that_does_not_come_up_is_stopped_as_failed() -> None:
    lease = with_slots(held(), slot())
    late = dataclasses.replace(known(1, slot(), state=fleet.ReplicaState.STARTING), age_s=301.0)
    (action,) = do(picture(deployments=(deployment(),), leases=(lease,), replicas=(late,)))
    assert action == actions.StopReplica(
        late.replica.replica_id, 0.0, "not serving after 301 s", True
    )


def test_a_replica_that_leaves_the_routes_for_a_moment_is_no_late_start() -> None:
    """One that had served for a day and did not answer for five seconds was stopped, undrained, as failed."""
    lease = with_slots(held(), slot())
    away = dataclasses.replace(
        known(1, slot(), state=fleet.ReplicaState.WARM), age_s=86_400.0, away_s=6.0
    )
    calm = picture(deployments=(deployment(),), leases=(lease,), replicas=(away,), jobs=(job(1),))
    assert do(calm) == []
    gone = dataclasses.replace(away, away_s=301.0)
    (action,) = do(dataclasses.replace(calm, replicas=(gone,)))
    assert action == actions.StopReplica(
        away.replica.replica_id, 0.0, "not serving after 301 s", False
    )


def test_a_replica_in_an_unknown_state_keeps_its_gpus_and_its_place() -> None:
    lease = with_slots(held(), slot())
    strange = dataclasses.replace(
        known(1, slot(), state=fleet.ReplicaState.UNKNOWN), age_s=86_400.0, away_s=3_000.0
    )
    snap = picture(
        deployments=(deployment(), deployment("other")),
        leases=(lease,),
        replicas=(strange,),
        jobs=(job(1),),
    )
    (ask,) = do(snap)
    assert isinstance(ask, actions.RequestLease)
    assert "other" in ask.reason


def test_a_job_of_which_slurm_says_nothing_is_not_adopted_yet() -> None:
    """It was adopted as what it could not be: that raised, and no plan took effect any more."""
    strange = job(1, slurm.JobState.UNKNOWN)
    assert do(picture(jobs=(strange,))) == []
    (adopted,) = do(picture(jobs=(job(1),)))
    assert isinstance(adopted, actions.AdoptLease)


def test_a_replacement_waits_for_the_slot_of_what_is_stopping() -> None:
    lease = with_slots(held(), slot())
    stopping = dataclasses.replace(known(1, slot()), run=False)
    made = plan.plan(
        picture(deployments=(deployment(),), leases=(lease,), replicas=(stopping,)), plans.OPTIONS
    )
    assert made.actions == ()
    assert made.notes == (f"chat v1: replica {stopping.replica.replica_id} is stopping",)
    drained = dataclasses.replace(known(1, slot()), drain_asked=True)
    (action,) = do(picture(deployments=(deployment(),), leases=(lease,), replicas=(drained,)))
    assert isinstance(action, actions.StopReplica)
    other = held(2)
    snap = picture(deployments=(deployment(),), leases=(lease, other), replicas=(drained,))
    (_, start) = do(snap)
    assert isinstance(start, actions.StartReplica)
    assert start.lease_id == other.lease.lease_id


def test_failures_pause_then_quarantine_and_the_lease_is_kept_meanwhile() -> None:
    lease = dataclasses.replace(held(), idle_s=500.0)
    snap = picture(deployments=(deployment(),), leases=(lease,))
    key = ("chat", "v1")
    paused = backoff.Failures(2, 1001.5, "no weights")
    made = plan.plan(dataclasses.replace(snap, failures={key: paused}), plans.OPTIONS)
    assert made.actions == ()
    assert made.notes == ("chat v1: next start in 1.5 s, after: no weights",)
    (action, *_) = do(
        dataclasses.replace(snap, failures={key: backoff.Failures(3, 0.0, "no weights")})
    )
    assert isinstance(action, actions.Quarantine)
    assert action.reason == "3 failed starts in a row, the last: no weights"
    barred = dataclasses.replace(
        deployment(), quarantined_until_us=action.until_us, quarantine_reason=action.reason
    )
    made = plan.plan(dataclasses.replace(snap, deployments=(barred,)), plans.OPTIONS)
    assert [type(item) for item in made.actions] == [actions.CloseLease]
    assert made.notes == (f"chat v1: quarantined: {action.reason}",)
    later = dataclasses.replace(snap, deployments=(barred,), now_us=action.until_us)
    assert [type(item) for item in do(later)] == [actions.StartReplica]


def loaded(
    number: int, which: int, batch: int, role: fleet.Role, age_s: float | None = 0.1
) -> snapshot.KnownReplica:
    base = known(number, slot(which=which, gpus=1))
    stats = fleet.ReplicaStats(1, 4, interactive=4 - batch, batch=batch)
    return dataclasses.replace(
        base,
        replica=dataclasses.replace(base.replica, stats=stats),
        wanted_role=role,
        stats_age_s=age_s,
    )


def test_rung_one_turns_the_replica_with_the_least_batch_after_two_ticks() -> None:
    shared = fleet.Role.SHARED
    found = (loaded(1, 0, 3, shared), loaded(2, 1, 1, shared), loaded(3, 2, 2, shared))
    lease = with_slots(held(gpus=3), *(slot(which=n, gpus=1) for n in range(3)))
    demand = {"chat": observed.Demand("chat", {"interactive": 2}, {}, 0.4)}
    world = plans.World(
        picture(
            deployments=(deployment(replicas=3, gpus=1),),
            leases=(lease,),
            replicas=found,
            demand=demand,
        )
    )
    first = world.think()
    assert first.actions == ()
    world.apply(first)
    second = world.think()
    assert second.actions == (
        actions.SetRole(
            found[1].replica.replica_id,
            fleet.Role.INTERACTIVE,
            "predicted wait 0.40 s is over half the TTFT SLO (500 ms): rung 1",
        ),
    )
    world.apply(second)
    calm = {"chat": observed.Demand("chat", {}, {})}
    world.snap = dataclasses.replace(world.snap, demand=calm)
    world.apply(world.think())
    world.snap = dataclasses.replace(world.snap, now=1030.5)
    (back,) = world.think().actions
    assert isinstance(back, actions.SetRole)
    assert (back.replica_id, back.role) == (found[1].replica.replica_id, shared)


@pytest.mark.parametrize("age_s", [None, 1.5])
def test_stale_stats_move_no_role_and_are_named(age_s: float | None) -> None:
    """S5: the broker's part: `fctl explain` shows these notes."""
    found = (loaded(1, 0, 3, fleet.Role.SHARED, age_s),)
    lease = with_slots(held(gpus=1), slot(gpus=1))
    snap = picture(
        deployments=(deployment(gpus=1),),
        leases=(lease,),
        replicas=found,
        demand={"chat": observed.Demand("chat", {"interactive": 9}, {}, 9.0)},
    )
    world = plans.World(snap)
    for _ in range(5):
        made = world.think()
        assert made.actions == ()
        (note,) = made.notes
        assert "chat: stale stats: none of its replicas has reported for 1 s" in note
        assert "roles stay as they are" in note
        world.apply(made)


def test_without_demand_the_gateways_are_what_is_missed() -> None:
    lease = with_slots(held(gpus=1), slot(gpus=1))
    found = (loaded(1, 0, 3, fleet.Role.SHARED),)
    snap = picture(deployments=(deployment(gpus=1),), leases=(lease,), replicas=found, demand={})
    (note,) = plans.World(snap).think().notes
    assert note == "chat: no gateway has told its demand, so roles stay as they are"


def test_holding_batch_makes_every_replica_interactive() -> None:
    found = (loaded(1, 0, 3, fleet.Role.SHARED), loaded(2, 1, 0, fleet.Role.SHARED))
    lease = with_slots(held(gpus=2), slot(gpus=1), slot(which=1, gpus=1))
    on_hold = dataclasses.replace(deployment(replicas=2, gpus=1), hold_batch=True)
    world = plans.World(picture(deployments=(on_hold,), leases=(lease,), replicas=found))
    made = world.think()
    assert [action.reason for action in made.actions] == ["an admin holds batch"] * 2
    world.apply(made)
    assert world.think().actions == ()
