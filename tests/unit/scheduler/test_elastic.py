"""The elastic planner's small modules, one situation each."""

import dataclasses
import math

import pytest

from scheduler.contracts import fleet, observed, slurm
from scheduler.core import (
    actions,
    autoscale,
    escalation,
    floors,
    forecast,
    lending,
    members,
    overflow,
    packing,
    placement,
    plan,
    rollover,
    snapshot,
    windows,
)
from scheduler.runtime import settings
from tests.unit.scheduler import plans

OPTIONS = dataclasses.replace(settings.Settings(), rungs=(0, 1, 2, 3), scale_fill=0.7)
S = autoscale.Signal


def need(
    scaling: autoscale.Scaling, signal: S, before: autoscale.Memory | None = None, now: float = 0.0
) -> autoscale.Need:
    return autoscale.need(scaling, signal, before, now, OPTIONS)


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
    asked = [type(each) for each in plan.plan(snap, OPTIONS).actions]
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


def test_leases_that_end_are_replaced_a_few_at_a_time_and_in_time() -> None:
    held = [dataclasses.replace(plans.held(n), left_s=600.0 + n) for n in range(1, 9)]
    far = dataclasses.replace(plans.held(9), left_s=90_000.0)
    snap = plans.picture(leases=(*held, far))
    rolling = rollover.rolling(snap, OPTIONS)
    assert rolling == {held[0].lease.lease_id, held[1].lease.lease_id}
    assert not rollover.rolling(plans.picture(leases=(far,)), OPTIONS)
    window = windows.Window("patch day", 500.0, 5000.0, frozenset({"n9"}))
    snap = plans.picture(leases=(far,), closures=(window,))
    assert rollover.rolling(snap, OPTIONS) == {far.lease.lease_id}


def test_a_successor_comes_a_measured_start_before_the_end() -> None:
    deployment = plans.deployment()  # fixed in number: its starts are measured all the same
    due = 2 * 40.0 + OPTIONS.drain_s
    for left, rolls in ((due + 1, False), (due - 1, True)):
        held = dataclasses.replace(plans.held(), left_s=left)
        snap = plans.picture(
            deployments=(deployment,), leases=(held,), starts={deployment.key: 40.0}
        )
        assert bool(rollover.rolling(snap, OPTIONS)) is rolls
    short = dataclasses.replace(plans.held().lease, walltime_s=60)
    for left, rolls in ((31.0, False), (29.0, True)):
        held = dataclasses.replace(plans.held(), lease=short, left_s=left)
        snap = plans.picture(deployments=(deployment,), leases=(held,))
        assert bool(rollover.rolling(snap, OPTIONS)) is rolls, "no start has been measured yet"


def test_a_window_elsewhere_and_one_that_is_over_touch_nothing() -> None:
    window = windows.Window("rack", 100.0, 200.0, frozenset({"n1"}))
    assert windows.until([window], ["n2"]) == (math.inf, "")
    assert windows.until([window], ["n1"])[0] == 100.0
    assert windows.until([window])[0] == 100.0  # an ask does not know its nodes yet
    assert windows.until([dataclasses.replace(window, starts_s=-9.0, ends_s=0.0)])[0] == math.inf


def test_no_lease_is_asked_for_that_would_cross_a_window() -> None:
    soon = windows.Window("patch day", 3600.0, 7200.0)
    options = dataclasses.replace(OPTIONS, lease_time_min_s=1800)
    made = plan.plan(plans.picture(deployments=(plans.deployment(),), closures=(soon,)), options)
    (ask,) = made.actions
    assert isinstance(ask, actions.RequestLease)
    assert (ask.walltime_s, ask.time_min_s) == (3540, 1800)  # a minute for Slurm to start it in
    sooner = dataclasses.replace(soon, starts_s=1000.0)
    made = plan.plan(plans.picture(deployments=(plans.deployment(),), closures=(sooner,)), options)
    assert not made.actions
    assert "patch day" in made.notes[0]


def node(name: str, free: int = 4, *flags: str) -> slurm.Node:
    return slurm.Node(name, "idle", frozenset(flags), not flags, ("serve",), 4, free)


def asked(
    *nodes: slurm.Node, closures: tuple[windows.Window, ...]
) -> tuple[actions.RequestLease | None, tuple[str, ...]]:
    picture = plans.picture(deployments=(plans.deployment(),), closures=closures)
    made = plan.plan(dataclasses.replace(picture, nodes=nodes), OPTIONS)
    found = [each for each in made.actions if isinstance(each, actions.RequestLease)]
    return found[0] if found else None, made.notes


def test_a_window_that_leaves_nodes_enough_cuts_nothing() -> None:
    rack = windows.Window("rack 1", 3600.0, 7200.0, frozenset({"n1"}))
    ask, _ = asked(node("n1"), node("n2"), closures=(rack,))
    assert ask is not None
    assert (ask.walltime_s, ask.time_min_s) == (0, 0)


def test_free_nodes_before_a_window_are_used_until_then_and_no_longer() -> None:
    """n2 has no window and no GPU free: a lease of two hours on n1 starts now."""
    rack = windows.Window("rack 1", 7300.0, 9000.0, frozenset({"n1"}))
    ask, _ = asked(node("n1"), node("n2", 0), closures=(rack,))
    assert ask is not None
    assert ask.walltime_s == 7200
    assert 0 < ask.time_min_s < 7200
    assert "rack 1" in ask.reason
    soon = dataclasses.replace(rack, starts_s=400.0)  # less than a start is worth
    ask, _ = asked(node("n1"), node("n2", 0), closures=(soon,))
    assert ask is not None
    assert ask.walltime_s == 0


def test_where_every_node_is_worked_on_nothing_is_asked_for() -> None:
    now = windows.Window("patch day", -60.0, 7200.0, frozenset({"n1", "n2"}))
    kept = (node("n1", 0, "maintenance"), node("n2", 0, "reserved", "maintenance"))
    ask, notes = asked(*kept, node("n3", 0, "drain"), closures=(now,))
    assert ask is None
    assert "patch day keeps every node that would do" in notes[0]


def test_a_cordoned_node_makes_no_lease_longer() -> None:
    """n1 has no window and is kept off: a lease for n2 ends before n2's."""
    rack = windows.Window("rack 2", 7300.0, 9000.0, frozenset({"n2"}))
    picture = plans.picture(deployments=(plans.deployment(),), closures=(rack,))
    kept_off = dataclasses.replace(
        picture, nodes=(node("n1"), node("n2")), cordoned=frozenset({"n1"})
    )
    (ask,) = plan.plan(kept_off, OPTIONS).actions
    assert isinstance(ask, actions.RequestLease)
    assert (ask.walltime_s, ask.exclude) == (7200, ("n1",))


def test_where_every_node_is_cordoned_nothing_is_asked_for() -> None:
    """Slurm would refuse each ask: it could start nowhere."""
    picture = plans.picture(deployments=(plans.deployment(),), nodes=(node("n1"), node("n2")))
    made = plan.plan(dataclasses.replace(picture, cordoned=frozenset({"n1", "n2"})), OPTIONS)
    assert not made.actions
    assert "every node is cordoned" in made.notes[0]


@pytest.mark.parametrize("starts_s", [650.0, 690.0, 700.0, 760.0])
def test_an_ask_that_waits_is_given_back_only_where_a_shorter_one_is_made(starts_s: float) -> None:
    rack = windows.Window("patch day", starts_s, 9000.0)
    waiting = plans.held(1, fleet.LeaseState.PENDING)
    lease = dataclasses.replace(waiting.lease, walltime_s=86_400)
    picture = plans.picture(
        deployments=(plans.deployment(),),
        leases=(dataclasses.replace(waiting, lease=lease),),
        closures=(rack,),
        jobs=(plans.job(1),),
    )
    kinds = [type(each).__name__ for each in plan.plan(picture, OPTIONS).actions]
    assert kinds.count("CloseLease") == kinds.count("RequestLease")


def test_an_ask_that_would_wait_for_a_windows_end_is_made_shorter_once() -> None:
    rack = windows.Window("patch day", 7300.0, 9000.0)
    waiting = plans.held(1, fleet.LeaseState.PENDING)
    waiting = dataclasses.replace(
        waiting, lease=dataclasses.replace(waiting.lease, walltime_s=86_400)
    )
    picture = plans.picture(
        deployments=(plans.deployment(),), leases=(waiting,), closures=(rack,), jobs=(plans.job(1),)
    )
    made = plan.plan(picture, OPTIONS)
    kinds = [type(each).__name__ for each in made.actions]
    assert kinds.count("CloseLease") == kinds.count("RequestLease") == 1
    (close,) = (each for each in made.actions if isinstance(each, actions.CloseLease))
    assert "patch day" in close.reason
    short = dataclasses.replace(
        waiting, lease=dataclasses.replace(waiting.lease, walltime_s=7200, time_min_s=630)
    )
    made = plan.plan(dataclasses.replace(picture, leases=(short,)), OPTIONS)
    assert not [each for each in made.actions if isinstance(each, actions.CloseLease)]


def test_a_replica_larger_than_a_node_asks_for_whole_nodes() -> None:
    options = dataclasses.replace(OPTIONS, node_gpus=8)
    made = plan.plan(plans.picture(deployments=(plans.deployment(gpus=12),)), options)
    (ask,) = made.actions
    assert isinstance(ask, actions.RequestLease)
    assert (ask.nodes, ask.gpus) == (2, 16)
    wide = dataclasses.replace(options, lease_gpus=16)
    made = plan.plan(plans.picture(deployments=(plans.deployment(gpus=4),)), wide)
    (ask,) = made.actions
    assert isinstance(ask, actions.RequestLease)
    assert (ask.nodes, ask.gpus) == (0, 8)  # the GPUs of one replica are never on two nodes


def test_a_lease_over_nodes_takes_only_what_is_larger_than_one() -> None:
    options = dataclasses.replace(OPTIONS, node_gpus=8)
    wide = plans.held(gpus=16)
    wide = dataclasses.replace(wide, lease=dataclasses.replace(wide.lease, whole_nodes=2))
    snap = plans.picture(
        deployments=(plans.deployment(gpus=4),), leases=(wide,), jobs=(plans.job(1),)
    )
    acts = plan.plan(snap, options).actions
    assert not [act for act in acts if isinstance(act, actions.StartReplica)], (
        "it may not fit a node"
    )
    large = dataclasses.replace(snap, deployments=(plans.deployment(gpus=16),))
    (start,) = plan.plan(large, options).actions
    assert isinstance(start, actions.StartReplica)


def _wide(number: int, gpus: int, nodes: int, *slots: snapshot.Slot) -> snapshot.HeldLease:
    wide = dataclasses.replace(plans.held(number, gpus=gpus), slots=slots)
    return dataclasses.replace(wide, lease=dataclasses.replace(wide.lease, whole_nodes=nodes))


def test_a_replica_over_nodes_has_its_nodes_to_itself() -> None:
    """Ten GPUs are five on each of two nodes: fourteen were "left" of three, and the next ten had none."""
    options = dataclasses.replace(OPTIONS, node_gpus=8)
    snap = plans.picture(
        deployments=(plans.deployment(replicas=2, gpus=10),),
        leases=(_wide(1, 24, 3),),
        jobs=(plans.job(1),),
    )
    start, ask = plan.plan(snap, options).actions
    assert isinstance(start, actions.StartReplica)
    assert isinstance(ask, actions.RequestLease)
    assert (ask.nodes, ask.gpus) == (2, 16)
    # The slot that such a replica leaves is as large as its nodes, and the next one goes into it.
    slot = plans.slot(1, gpus=16)
    free = dataclasses.replace(snap, leases=(_wide(1, 24, 3, slot),))
    starts = [act for act in plan.plan(free, options).actions if isinstance(act, type(start))]
    assert [start.slot_id for start in starts] == [slot.slot_id]


def test_what_an_ask_leaves_is_whole_nodes_too() -> None:
    options = dataclasses.replace(OPTIONS, node_gpus=8, lease_gpus=24)
    large = dataclasses.replace(
        plans.spec(gpus=10), hardware=fleet.Hardware(memory_gb=100.0, cpus=10)
    )
    snap = plans.picture(deployments=(snapshot.Deployment(large, 2),))
    asked = [
        act for act in plan.plan(snap, options).actions if isinstance(act, actions.RequestLease)
    ]
    assert [(ask.nodes, ask.gpus, ask.hardware.memory_gb) for ask in asked] == [(3, 24, 100.0)] * 2


def test_whole_gpus_of_replicas() -> None:
    assert members.gpus(plans.spec(gpus=12), 8) == 16
    assert members.gpus(plans.spec(gpus=12), 8, 2) == 32
    assert members.gpus(plans.spec(gpus=4), 8, 3) == 12
    assert members.gpus(plans.spec(gpus=12), 0, 2) == 24, "no node's size is known"
    half = dataclasses.replace(plans.spec(gpus=50), hardware=fleet.Hardware("shard", parts=100))
    assert members.gpus(half, 8, 3) == 2


def test_no_replica_is_moved_into_a_lease_over_nodes() -> None:
    """Its free GPUs may be one on each node; what was moved there found no place, tick after tick."""
    near = plans.held(2)
    small = plans.slot(2, gpus=2)
    near = dataclasses.replace(near, slots=(small,))
    snap = plans.picture(
        leases=(_wide(1, 16, 2), near), replicas=(plans.known(1, small, model="small"),)
    )
    rooms = placement.rooms(snap, silent_s=5.0)
    assert packing.make_hole(rooms, snap.replicas, 4) is None
    beside = dataclasses.replace(snap, leases=(plans.held(1), near))
    hole = packing.make_hole(placement.rooms(beside, silent_s=5.0), snap.replicas, 4)
    assert hole is not None


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
    (start,) = plan.plan(snap, OPTIONS).actions
    assert isinstance(start, actions.StartReplica)
    assert "missed their budget of 30 s" in start.reason
    in_time = dataclasses.replace(late, age_s=29.0)
    assert not plan.plan(dataclasses.replace(snap, replicas=(in_time,)), OPTIONS).actions
    waits = dataclasses.replace(late, replica=dataclasses.replace(late.replica, staging=True))
    assert not plan.plan(dataclasses.replace(snap, replicas=(waits,)), OPTIONS).actions
    # Once the other one serves, the late one is one too many, though it may still come.
    slots = (plans.slot(), plans.slot(1, 1))
    both = dataclasses.replace(
        snap,
        leases=(dataclasses.replace(lease, slots=slots),),
        replicas=(late, plans.known(2, slots[1])),
        scale_memory={("chat", "v1"): autoscale.Memory(1)},
    )
    made = plan.plan(both, OPTIONS).actions
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
