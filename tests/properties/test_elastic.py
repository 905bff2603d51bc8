"""The elastic planner: floors and bounds hold, GPUs are conserved, windows are not crossed."""

import dataclasses
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contracts import fleet
from scheduler.core import (
    actions,
    autoscale,
    floors,
    forecast,
    lending,
    plan,
    rollover,
    snapshot,
    windows,
)
from scheduler.runtime import settings as runtime_settings
from tests.unit.scheduler import plans

OPTIONS = dataclasses.replace(runtime_settings.Settings(), rungs=(0, 1, 2, 3))
APART = dataclasses.replace(OPTIONS, rungs=(3,))

signals = st.builds(
    autoscale.Signal,
    serving=st.integers(0, 40), coming=st.integers(0, 10), waiting=st.integers(0, 500),
    in_flight=st.integers(0, 5000), oldest_wait_s=st.floats(0, 60), ttft_ms=st.floats(0, 5000),
    itl_ms=st.floats(0, 200), kv=st.floats(0, 1), rate=st.none() | st.floats(0, 5000),
    outlook=st.none() | st.floats(0, 5000), floor=st.integers(0, 5), seats=st.integers(1, 256),
    standard=st.floats(0, 1), standard_rate=st.floats(0, 1),
)  # fmt: skip
scalings = st.builds(
    autoscale.Scaling,
    floor=st.integers(0, 4), minimum=st.integers(0, 4), maximum=st.integers(5, 60) | st.just(0),
    concurrency=st.floats(0, 100), requests_per_s=st.floats(0, 20), start_s=st.floats(0, 600),
    idle_to_zero_s=st.floats(0, 2000), park_gb=st.floats(0, 100),
    interactive_floor=st.integers(0, 2), interactive_maximum=st.integers(2, 30) | st.just(0),
    standard_floor=st.integers(0, 2), standard_minimum=st.integers(0, 2),
    standard_maximum=st.integers(2, 30) | st.just(0),
    batch_floor=st.sampled_from([0, 0, 1, 3]),
)  # fmt: skip


@settings(deadline=None)
@given(scalings, st.lists(st.tuples(signals, st.floats(0.2, 200)), min_size=1, max_size=12))
def test_need_is_never_below_a_floor_nor_above_the_maximum(
    scaling: autoscale.Scaling, told: list[tuple[autoscale.Signal, float]]
) -> None:
    memory, now, before = None, 1000.0, None
    for signal, passed in told:
        now += passed
        found = autoscale.need(scaling, signal, memory, now, OPTIONS)
        busy = signal.waiting + signal.in_flight > 0 or bool(signal.rate)
        least = scaling.least(used=busy)
        assert found.replicas >= least
        if scaling.maximum:
            assert found.replicas <= max(scaling.maximum, scaling.least(used=True))
            assert found.replicas >= max(least, min(signal.floor, scaling.maximum))
        else:
            assert found.replicas >= signal.floor
        assert found.reason
        if before is not None and found.replicas < before:
            # Down goes a tenth at a time; a bound that is lower than the memory is obeyed at once.
            lowest = before - max(1, math.ceil(before * 0.1))
            assert found.replicas >= lowest or found.replicas == scaling.maximum
        memory, before = found.memory, found.replicas


backlogs = st.builds(
    lending.Backlog, st.floats(0, 1e6), st.floats(60, 1e5) | st.just(math.inf), st.just(1)
)


@st.composite
def wants(draw: st.DrawFn) -> list[lending.Want]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        current = draw(st.integers(0, 20))
        found.append(
            lending.Want(
                (f"m{number}", "v1"), draw(st.sampled_from([1, 2, 4, 8])), draw(backlogs), current,
                maximum=draw(st.sampled_from([0, 0, 3, 30])), young=draw(st.integers(0, current)),
            )
        )  # fmt: skip
    return found


@settings(deadline=None)
@given(st.integers(0, 200), wants(), st.booleans())
def test_lent_gpus_fit_and_none_that_batch_could_use_stays_idle(
    spare: int, asked: list[lending.Want], settled: bool
) -> None:
    given_to = lending.lend(spare, asked, settled=settled)
    used = sum(given_to[want.key] * want.gpus for want in asked)
    assert used <= spare
    assert all(count >= 0 for count in given_to.values())
    for want in asked:
        useful = math.ceil(want.backlog.work_s / lending.LEAST_LEFT_S)
        most = min(useful, want.maximum or useful)
        if want.backlog.work_s <= 0:
            assert given_to[want.key] == 0
        elif given_to[want.key] < most:
            assert spare - used < want.gpus  # nothing that it could use is left over


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 27 * 86_400), st.floats(0, 1000)), min_size=1, max_size=200),
    st.floats(0, 7 * 86_400 - 1),
    st.floats(0, 7200),
)
def test_a_forecast_lies_within_what_was_seen_and_says_how_sure_it_is(
    samples: list[tuple[int, float]], at: float, ahead: float
) -> None:
    curve = forecast.learn((float(second), rate) for second, rate in samples)
    found = curve.ahead(at, ahead)
    if found is None:
        return
    seen = [rate for _, rate in samples]
    assert min(seen) - 1e-6 <= found.mean <= max(seen) + 1e-6
    assert found.upper >= found.mean - 1e-6 * max(seen)
    assert 0 <= found.sure <= 1


@st.composite
def pictures(draw: st.DrawFn) -> snapshot.Snapshot:
    sizes = {"chat": 4, "code": 1, "judge": 2}
    held = []
    found: list[snapshot.KnownReplica] = []
    number = 0
    for which in range(1, draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(list(fleet.LeaseKind)))
        slots: list[snapshot.Slot] = []
        free = 8
        while free > 0 and draw(st.booleans()):
            model = draw(st.sampled_from([m for m, size in sizes.items() if size <= free]))
            slot = plans.slot(which, len(slots), sizes[model])
            slots.append(slot)
            free -= sizes[model]
            if draw(st.booleans()):
                number += 1
                state = draw(
                    st.sampled_from([fleet.ReplicaState.SERVING, fleet.ReplicaState.STARTING])
                )
                role = draw(st.sampled_from(list(fleet.Role)))
                one = dataclasses.replace(plans.known(number, slot, model, state), wanted_role=role)
                found.append(dataclasses.replace(one, run=draw(st.booleans())))
            elif draw(st.booleans()):
                number += 1
                found.append(plans.known(number, slot, model, fleet.ReplicaState.ASLEEP))
        base = plans.held(which, gpus=8)
        held.append(
            dataclasses.replace(
                base,
                lease=dataclasses.replace(base.lease, kind=kind),
                slots=tuple(slots),
                left_s=draw(st.sampled_from([math.inf, 10.0, 500.0, 5000.0])),
                park_gb=draw(st.sampled_from([0.0, 20.0, 500.0])),
            )
        )
    deployments = tuple(
        dataclasses.replace(
            plans.deployment(model, 0, size),
            scaling=draw(scalings),
            role=fleet.Role.BATCH if model == "judge" else fleet.Role.SHARED,
        )
        for model, size in sizes.items()
    )
    return plans.picture(
        leases=tuple(held),
        replicas=tuple(found),
        jobs=tuple(plans.job(n) for n in range(1, len(held) + 1)),
        deployments=deployments,
        gpus=draw(st.sampled_from([0, 16, 40, 64])),
        rates={model: draw(st.floats(0, 100)) for model in sizes},
        backlogs={model: draw(backlogs) for model in sizes if draw(st.booleans())},
        scheduled=tuple(
            floors.Floor("s", model, draw(st.integers(0, 4)), draw(st.floats(-9, 900)), 1000.0)
            for model in sizes
            if draw(st.booleans())
        ),
        closures=tuple(
            windows.Window("patch day", draw(st.floats(0, 90_000)), 100_000.0)
            for _ in range(draw(st.integers(0, 1)))
        ),
    )


@settings(deadline=None)
@given(pictures(), st.sampled_from([OPTIONS, APART]))
def test_a_plan_keeps_to_the_fleet_and_says_why(
    snap: snapshot.Snapshot, options: runtime_settings.Settings
) -> None:
    made = plan.plan(snap, options)
    sizes = {each.key: each.spec.gpus for each in snap.deployments}
    scalings = {each.key: each.scaling for each in snap.deployments if each.scaling}
    floor = {key: scaling.least(used=False) for key, scaling in scalings.items()}
    needed = sum(target.need * sizes[key] for key, target in made.wanted.items())
    lent = sum(target.lent * sizes[key] for key, target in made.wanted.items())
    if snap.gpus:
        least = sum(each.least(used=True) * sizes[key] for key, each in scalings.items())
        assert needed <= max(snap.gpus, least)
        assert lent == 0 or needed + lent <= snap.gpus
    for key, target in made.wanted.items():
        assert target.need >= floor[key]
    if snap.gpus and needed > least:
        # Callers are above their floors: then batch has all of its own, but for what fits no replica.
        apart = sum(each.batch_floor * sizes[key] for key, each in scalings.items())
        assert needed <= max(least, snap.gpus - apart)
    free = {held.lease.lease_id: held.lease.gpus for held in snap.leases}
    for held in snap.leases:
        free[held.lease.lease_id] -= sum(slot.gpus for slot in held.slots)
    asleep = {
        known.replica.replica_id
        for known in snap.replicas
        if known.replica.state is fleet.ReplicaState.ASLEEP
    }
    taken: set[str] = set()
    for action in made.actions:
        assert not hasattr(action, "reason") or action.reason
        if isinstance(action, actions.StartReplica):
            if action.slot_id is None:
                free[action.lease_id] -= action.spec.gpus
                assert free[action.lease_id] >= 0
            else:
                assert action.slot_id not in taken
                taken.add(action.slot_id)
        if isinstance(action, actions.WakeReplica):
            assert action.replica_id in asleep
            asleep.remove(action.replica_id)
        if isinstance(action, actions.RequestLease):
            whole = action.walltime_s or options.lease_walltime_s
            assert all(window.starts_s >= whole for window in snap.closures)
    asked = sum(a.gpus for a in made.actions if isinstance(a, actions.RequestLease))
    rolling = rollover.rolling(snap, options)
    if snap.gpus and asked:
        # What this plan gives back is asked for anew at once: Slurm starts the one when the other has left.
        going = {a.lease_id for a in made.actions if isinstance(a, actions.CloseLease)} | rolling
        staying = sum(h.lease.gpus for h in snap.leases if h.lease.lease_id not in going)
        assert staying + asked <= snap.gpus


@settings(deadline=None)
@given(pictures())
def test_what_rolls_over_serves_until_its_successor_does(snap: snapshot.Snapshot) -> None:
    made = plan.plan(snap, OPTIONS)
    rolling = rollover.rolling(snap, OPTIONS)
    by_id: dict[str, Any] = {known.replica.replica_id: known for known in snap.replicas}
    left = {held.lease.lease_id: rollover.left_s(held, snap) for held in snap.leases}
    for action in made.actions:
        if not isinstance(action, actions.StopReplica):
            continue
        known = by_id[action.replica_id]
        if known.replica.lease_id not in rolling:
            continue
        serving = sum(
            other.run
            and other.key == known.key
            and other.replica.state is fleet.ReplicaState.SERVING
            and other.replica.lease_id not in rolling
            for other in snap.replicas
        )
        enough = serving >= made.wanted[known.key].total
        assert enough or left[known.replica.lease_id] <= OPTIONS.drain_s * 1.5
