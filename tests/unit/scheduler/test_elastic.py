"""The elastic planner's small modules, one situation each: how many, where to, and when that is too slow."""

import dataclasses
import math

import pytest

from scheduler.contracts import fleet, observed
from scheduler.core import (
    actions,
    autoscale,
    escalation,
    floors,
    forecast,
    lending,
    overflow,
    packing,
    placement,
    plan,
    snapshot,
)
from tests.unit.scheduler import plans

S = autoscale.Signal


def need(
    scaling: autoscale.Scaling, signal: S, before: autoscale.Memory | None = None, now: float = 0.0
) -> autoscale.Need:
    return autoscale.need(scaling, signal, before, now, plans.ELASTIC)


def test_a_version_that_no_request_can_come_to_falls_to_its_floor_at_once() -> None:
    """What was rolled back must not keep the GPUs that the next rollout needs, whatever was asked of it."""
    before = autoscale.Memory(need=7, busy_at=99.0)
    for floor, signal in ((0, S(serving=7, floor=3)), (2, S(serving=7, in_flight=5))):
        gone = autoscale.Scaling(floor=floor, concurrency=1, share=0.0, idle_to_zero_s=900)
        found = need(gone, signal, before, now=100.0)
        assert (found.replicas, found.memory.need) == (floor, floor)
        assert found.reason.startswith("no request can come to it")
    for floor, kept, why in ((0, 2, "2 still answer"), (2, 2, "floor 2"), (3, 3, "floor 3")):
        gone = autoscale.Scaling(floor=floor, share=0.0)
        found = need(gone, S(serving=7, answering=2), before, now=100.0)
        assert (found.replicas, found.memory.need) == (kept, kept), "an answer is of one version"
        assert found.reason == f"no request can come to it: {why}"


def test_the_largest_signal_wins_and_is_named() -> None:
    scaling = autoscale.Scaling(concurrency=10, requests_per_s=2)
    assert need(scaling, S(in_flight=20, waiting=15)).replicas == 5
    found = need(scaling, S(in_flight=20, rate=14.0))
    assert (found.replicas, found.reason) == (10, "14.0 requests/s")
    found = need(scaling, S(in_flight=20, rate=1.0, outlook=28.0))
    assert found.replicas == 20
    assert "forecast" in found.reason


def test_pressure_adds_replicas_only_when_it_lasts() -> None:
    scaling = autoscale.Scaling(concurrency=100)
    signal = S(serving=8, in_flight=10, waiting=3, oldest_wait_s=1.0)
    first = need(scaling, signal, autoscale.Memory(8), 0.0)
    assert first.replicas == 8
    later = need(scaling, signal, first.memory, 5.0)
    assert later.replicas == 10
    assert "pressure" in later.reason
    calm = need(scaling, S(serving=8, in_flight=10), first.memory, 5.0)
    assert calm.memory.pressed_at is None


def test_down_goes_slowly_by_tenths_after_a_wait() -> None:
    scaling = autoscale.Scaling(concurrency=10, floor=2)
    memory, seen = autoscale.Memory(20), []
    for second in range(0, 1000, 30):
        found = need(scaling, S(serving=20, in_flight=7), memory, float(second))
        memory = found.memory
        seen.append(found.replicas)
    assert seen[:10] == [20] * 10
    assert seen[10:13] == [18, 16, 14]
    assert seen[-1] == 2


@pytest.mark.parametrize(("share", "there"), [(0.5, True), (0.01, True), (0.0, False)])
def test_one_waiting_request_brings_back_each_version_that_may_have_to_take_it(
    share: float, there: bool
) -> None:
    """Two versions of half each at zero: half a request was rounded to none, and it waited in vain."""
    scaling = autoscale.Scaling(concurrency=10, share=share)
    snap = plans.picture(
        deployments=(dataclasses.replace(plans.deployment(replicas=0), scaling=scaling),),
        demand={"chat": observed.Demand("chat", {"interactive": 1}, {}, oldest_wait_s=1.0)},
        scale_memory={("chat", "v1"): autoscale.Memory(0)},
    )
    asked = [type(each) for each in plan.plan(snap, plans.ELASTIC).actions]
    assert asked == ([actions.RequestLease] if there else [])


def test_to_zero_when_nobody_asks_and_one_as_soon_as_somebody_does() -> None:
    scaling = autoscale.Scaling(concurrency=10, idle_to_zero_s=900)
    memory = need(scaling, S(serving=1, in_flight=1), None, 0.0).memory
    quiet = need(scaling, S(serving=1), memory, 600.0)
    assert quiet.replicas == 1
    memory = quiet.memory
    for second in range(901, 1800, 60):
        found = need(scaling, S(serving=1), memory, float(second))
        memory = found.memory
    assert found.replicas == 0
    assert need(scaling, S(waiting=1), memory, 2000.0).replicas == 1


def test_a_schedule_counts_before_it_begins_by_the_time_of_a_start() -> None:
    floor = floors.Floor("morning", "chat", 8, starts_s=400.0, ends_s=4000.0)
    assert floors.floor_of("chat", [floor], 300.0) == (0, "")
    assert floors.floor_of("chat", [floor], 450.0) == (8, "morning")
    found = need(autoscale.Scaling(maximum=4), S(floor=8, floor_name="morning"))
    assert found.replicas == 4
    assert found.reason == "maximum 4, though schedule morning asks for 8"
    over = dataclasses.replace(floor, starts_s=-4000.0, ends_s=0.0)
    assert floors.floor_of("chat", [over], 450.0) == (0, "")
    found = need(autoscale.Scaling(concurrency=10), S(floor=8, floor_name="morning"))
    assert found.replicas == 8
    assert "morning" in found.reason


def test_a_forecast_knows_weekdays_from_weekends_and_how_sure_it_is() -> None:
    samples = []
    for day in range(14):
        for slot in range(96):
            busy = 100.0 if day % 7 < 5 and 36 <= slot < 72 else 5.0
            samples.append((day * 86_400.0 + slot * 900.0, busy * (1 + 0.02 * (day // 7))))
    curve = forecast.learn(samples)
    monday, saturday = curve.at(10 * 3600.0), curve.at(5 * 86_400 + 10 * 3600.0)
    assert monday is not None
    assert saturday is not None
    assert monday.mean == pytest.approx(101, rel=0.01)
    assert saturday.mean == pytest.approx(5.05, rel=0.01)
    assert monday.sure > forecast.TRUSTED
    ahead = curve.ahead(8.9 * 3600, 900)
    now = curve.at(8.5 * 3600)
    assert ahead is not None
    assert now is not None
    assert ahead.mean > 10 * now.mean  # warm before nine o'clock comes
    one_day = forecast.learn(samples[:96]).at(10 * 3600.0)
    assert one_day is not None
    assert one_day.sure < monday.sure
    assert one_day.upper > 1.3 * one_day.mean
    assert forecast.learn([]).at(0.0) is None


def test_deadlines_are_served_first_and_shares_do_not_flicker() -> None:
    urgent = lending.Want(("a", "v1"), 4, lending.Backlog(8 * 3600.0, 3600.0))
    patient = lending.Want(("b", "v1"), 1, lending.Backlog(1e6))
    given = lending.lend(40, [urgent, patient])
    assert given[("a", "v1")] >= 8
    kept = dataclasses.replace(urgent, current=given[("a", "v1")] + 1)
    assert lending.lend(60, [kept])[("a", "v1")] >= kept.current
    assert lending.lend(0, [kept, patient]) == {("a", "v1"): 0, ("b", "v1"): 0}


def test_a_start_that_missed_its_budget_gets_company() -> None:
    lease = dataclasses.replace(plans.held(gpus=8), slots=(plans.slot(),))
    late = plans.known(1, plans.slot(), state=fleet.ReplicaState.STARTING)
    late = dataclasses.replace(late, budget_s=30.0, age_s=31.0)
    scaled = dataclasses.replace(
        plans.deployment(), scaling=autoscale.Scaling(floor=1), role=fleet.Role.INTERACTIVE
    )
    snap = plans.picture(
        deployments=(scaled,), leases=(lease,), replicas=(late,), jobs=(plans.job(1),)
    )
    (start,) = plan.plan(snap, plans.ELASTIC).actions
    assert isinstance(start, actions.StartReplica)
    assert "missed their budget of 30 s" in start.reason
    in_time = dataclasses.replace(late, age_s=29.0)
    assert not plan.plan(dataclasses.replace(snap, replicas=(in_time,)), plans.ELASTIC).actions
    waits = dataclasses.replace(late, replica=dataclasses.replace(late.replica, staging=True))
    assert not plan.plan(dataclasses.replace(snap, replicas=(waits,)), plans.ELASTIC).actions
    # Once the other one serves, the late one is one too many, though it may still come.
    slots = (plans.slot(), plans.slot(1, 1))
    both = dataclasses.replace(
        snap,
        leases=(dataclasses.replace(lease, slots=slots),),
        replicas=(late, plans.known(2, slots[1])),
        scale_memory={("chat", "v1"): autoscale.Memory(1)},
    )
    made = plan.plan(both, plans.ELASTIC).actions
    stopped = [action for action in made if isinstance(action, actions.StopReplica)]
    assert [action.replica_id for action in stopped] == [late.replica.replica_id]


def test_budgets_follow_what_was_measured() -> None:
    assert escalation.budget_s([], 100.0) == 200.0
    steady = [100.0] * 20
    assert escalation.budget_s(steady, 1.0) == 200.0
    wild = [10.0] * 15 + [100.0] * 5
    assert escalation.uncertain(wild)
    assert escalation.budget_s(wild, 1.0) == 100.0
    assert escalation.budget_s([0.5] * 20, 1.0) == escalation.LEAST_S


def test_batch_overflows_only_when_it_would_be_late_and_the_other_has_room() -> None:
    busy = overflow.Side("a", 10, {"m": overflow.Work(100_000, 3600)}, frozenset({"m"}))
    idle = overflow.Side("b", 50, {}, frozenset({"m"}))
    (move,) = overflow.decide([busy, idle])
    assert (move.source, move.target) == ("a", "b")
    assert move.gpu_s == pytest.approx(100_000 - 10 * 3600 * 0.9)
    assert not overflow.decide([busy, dataclasses.replace(idle, serves=frozenset())])
    assert not overflow.decide([busy, dataclasses.replace(idle, spare_gpus=0)])
    assert not overflow.decide([dataclasses.replace(busy, spare_gpus=40), idle])
    assert not overflow.decide([busy, dataclasses.replace(busy, cluster="b")])


def test_scattered_gpus_are_gathered_by_moving_batch_replicas_first() -> None:
    def room(number: int, *models: str) -> tuple[snapshot.HeldLease, list[snapshot.KnownReplica]]:
        slots = tuple(plans.slot(number, which, 1) for which in range(len(models)))
        found: list[snapshot.KnownReplica] = []
        for slot, model in zip(slots, models, strict=True):
            one = plans.known(number * 10 + len(found), slot, model)
            role = fleet.Role.BATCH if model == "judge" else fleet.Role.SHARED
            found.append(dataclasses.replace(one, wanted_role=role))
        return dataclasses.replace(plans.held(number, gpus=8), slots=slots), found

    first, one = room(1, "code", "code", "code", "code", "code", "judge")
    second, two = room(2, "code", "code", "code", "code", "judge", "judge")
    snap = plans.picture(leases=(first, second), replicas=(*one, *two))
    rooms = placement.rooms(snap, silent_s=5.0)
    hole = packing.make_hole(rooms, snap.replicas, 4)
    assert hole is not None
    assert hole.room.lease_id == second.lease.lease_id
    assert [known.key[0] for known in hole.moved] == ["judge", "judge"]
    assert packing.make_hole(rooms[:1], one, 4) is None  # nowhere for them to go


def test_small_replicas_move_only_where_their_memory_is() -> None:
    """GPUs elsewhere did, and what was stopped for the large one found no room to start again."""
    slots = [tuple(plans.slot(number, which, 1) for which in range(5)) for number in (1, 2)]
    snap = plans.picture(
        leases=tuple(
            dataclasses.replace(plans.held(number, gpus=8), slots=slots[number - 1])
            for number in (1, 2)
        ),
        replicas=tuple(
            _needing(plans.known(10 * slot_of, slot, "code"), 50.0)
            for slot_of, slot in enumerate((*slots[0], *slots[1]), 1)
        ),
    )
    for here, there, found in ((0, 49, False), (0, 50, True), (49, 0, False), (math.inf, 0, True)):
        rooms = placement.rooms(snap, silent_s=5.0)
        rooms[0].free_gb, rooms[1].free_gb = here, there
        assert (packing.make_hole(rooms[:2], snap.replicas, 4, 50.0) is not None) == found


def _needing(known: snapshot.KnownReplica, memory_gb: float) -> snapshot.KnownReplica:
    spec = known.replica.spec
    hardware = dataclasses.replace(spec.hardware, memory_gb=memory_gb)
    spec = dataclasses.replace(spec, hardware=hardware)
    return dataclasses.replace(known, replica=dataclasses.replace(known.replica, spec=spec))
