"""Replicas on profiles: leases are asked for by them, hold no others, and fill by units and memory."""

import dataclasses

import pytest

from scheduler.contracts import fleet
from scheduler.core import actions, autoscale, overlap, plan, prestage, snapshot
from tests.unit.scheduler import plans

SHARD = fleet.Hardware("shard", parts=4, memory_gb=6.0)
CPU = fleet.Hardware("none", memory_gb=8.0, cpus=4)
H100 = fleet.Hardware(gres_type="H100", constraint="nvlink", memory_gb=100.0, container="/i.sif")


def wants(
    hardware: fleet.Hardware, gpus: int = 1, replicas: int = 1, model: str = "embed"
) -> snapshot.Deployment:
    spec = dataclasses.replace(plans.spec(model, gpus), hardware=hardware)
    return snapshot.Deployment(spec, replicas)


def running(hardware: fleet.Hardware, gpus: int, number: int = 1) -> snapshot.HeldLease:
    held = plans.held(number, gpus=gpus)
    return dataclasses.replace(held, lease=dataclasses.replace(held.lease, hardware=hardware))


def done(lease_gpus: int = 0, **parts: object) -> list[actions.Action]:
    options = dataclasses.replace(plans.OPTIONS, lease_gpus=lease_gpus)
    return list(plan.plan(plans.picture(**parts), options).actions)


def asked(found: list[actions.Action]) -> list[actions.RequestLease]:
    return [each for each in found if isinstance(each, actions.RequestLease)]


def started(found: list[actions.Action]) -> list[actions.StartReplica]:
    return [each for each in found if isinstance(each, actions.StartReplica)]


def test_a_lease_is_asked_for_by_the_profile_of_its_replica() -> None:
    (one,) = asked(done(deployments=(wants(H100, 2),)))
    assert (one.gpus, one.hardware) == (2, H100)
    (two,) = asked(done(4, deployments=(wants(H100, 2),)))
    assert (two.gpus, two.hardware.memory_gb) == (4, 200.0)  # for both replicas that fit


@pytest.mark.parametrize(
    ("hardware", "gpus", "lease_gpus", "cpus"),
    [
        (dataclasses.replace(H100, cpus=32), 4, 0, 32),
        (dataclasses.replace(H100, cpus=32), 4, 8, 64),
        (fleet.Hardware("mps", parts=100, cpus=2), 50, 1, 4),
        (CPU, 0, 0, 4),
    ],
)
def test_cpus_are_asked_for_by_replica_not_by_unit(
    hardware: fleet.Hardware, gpus: int, lease_gpus: int, cpus: int
) -> None:
    """Half a GPU of mps asked for a hundred times its CPUs, and Slurm refused it."""
    (one,) = asked(done(lease_gpus, deployments=(wants(hardware, gpus),)))
    assert one.hardware.cpus == cpus


def test_small_replicas_share_a_lease_of_one_gpus_shards() -> None:
    """Two shards of four each: the first asks for all of a GPU, the second waits for that very lease."""
    (one,) = asked(done(1, deployments=(wants(SHARD, 2, replicas=2),)))
    assert (one.gpus, one.hardware.gres, one.hardware.memory_gb) == (4, "shard", 12.0)
    assert "embed v1 needs shard:2 of a GPU" in one.reason
    lease = running(one.hardware, 4)
    both = started(done(1, deployments=(wants(SHARD, 2, replicas=2),), leases=(lease,)))
    assert [each.lease_id for each in both] == [lease.lease.lease_id] * 2


def test_without_lease_gpus_a_lease_has_as_many_shards_as_its_replica() -> None:
    """Then it is Slurm that packs leases onto GPUs."""
    found = asked(done(deployments=(wants(SHARD, 1, replicas=2),)))
    assert [each.gpus for each in found] == [1, 1]


def test_a_lease_is_full_by_memory_where_shards_are_left() -> None:
    lease = running(dataclasses.replace(SHARD, memory_gb=13.0), 4)
    found = done(1, deployments=(wants(SHARD, 1, replicas=3),), leases=(lease,))
    assert len(started(found)) == 2
    assert len(asked(found)) == 1


@pytest.mark.parametrize(
    "other",
    [
        fleet.ANY_NODE,
        dataclasses.replace(SHARD, constraint="fast"),
        dataclasses.replace(SHARD, parts=8),
        dataclasses.replace(SHARD, container="/other.sif"),
    ],
)
def test_nothing_goes_into_a_lease_of_other_hardware(other: fleet.Hardware) -> None:
    found = done(deployments=(wants(SHARD),), leases=(running(other, 4),))
    assert not started(found)
    assert len(asked(found)) == 1


def test_each_replica_on_cpus_has_a_lease_of_its_own() -> None:
    first = done(deployments=(wants(CPU, 0, replicas=2),))
    assert [(each.gpus, each.hardware) for each in asked(first)] == [(0, CPU)] * 2
    leases = (running(CPU, 0, 1), running(CPU, 0, 2))
    found = started(done(deployments=(wants(CPU, 0, replicas=2),), leases=leases))
    assert sorted(each.lease_id for each in found) == sorted(h.lease.lease_id for h in leases)


def test_shards_count_as_parts_of_the_fleets_gpus() -> None:
    leases = (running(SHARD, 4, 1), running(SHARD, 1, 2))
    chat = (wants(fleet.ANY_NODE, 1, model="chat"),)
    assert not asked(done(gpus=2, leases=leases, deployments=chat))
    assert len(asked(done(gpus=3, leases=leases, deployments=chat))) == 1
    assert SHARD.whole(5) == 2


def test_parts_of_a_gpu_take_back_no_more_leases_than_gpus() -> None:
    """For mps:50 each lease of batch was closed, until fifty GPUs would have come free."""
    mps = fleet.Hardware("mps", parts=100)
    wanted = dataclasses.replace(
        wants(mps, 50), scaling=autoscale.Scaling(floor=1, maximum=1, concurrency=8)
    )
    idle = [plans.held(number, gpus=1) for number in (1, 2, 3)]
    leases = tuple(
        dataclasses.replace(
            held, lease=dataclasses.replace(held.lease, kind=fleet.LeaseKind.BACKFILL)
        )
        for held in idle
    )
    found = done(deployments=(wanted,), leases=leases)
    assert len([each for each in found if isinstance(each, actions.CloseLease)]) == 1


def test_parts_are_gpus_where_gpus_are_counted() -> None:
    old, new = running(SHARD, 4, 1), running(SHARD, 4, 2)
    assert overlap.held_twice(plans.picture(leases=(old, new)), {old.lease.lease_id}, 1) == 1
    staged = fleet.ReplicaSpec(
        "embed", "v1", fleet.EngineKind.VLLM, "s3://models/embed", gpus=3, hardware=SHARD
    )
    assert prestage.wanted([snapshot.Deployment(staged, 1)], {}, 1, 9) == (staged,)


def in_slot(
    held: snapshot.HeldLease, which: int, model: str, **changes: object
) -> tuple[snapshot.Slot, snapshot.KnownReplica]:
    """Return a slot of one unit and the replica in it, of the lease's hardware with 6 GB."""
    slot = dataclasses.replace(plans.slot(1, which, 1), lease_id=held.lease.lease_id)
    known = plans.known(10 + which, slot, model)
    replica = dataclasses.replace(known.replica, spec=wants(SHARD, model=model).spec)
    parts = {"replica": replica, **changes}
    return slot, dataclasses.replace(known, **parts)  # type: ignore[arg-type] # the test's own fields


def test_memory_that_a_stopping_replica_leaves_is_waited_for() -> None:
    """A lease full by memory counted as full for ever: a second one was asked for at each change."""
    lease = running(dataclasses.replace(SHARD, memory_gb=6.0), 4)
    slot, going = in_slot(lease, 0, "old", run=False)
    lease = dataclasses.replace(lease, slots=(slot,))
    made = plan.plan(
        plans.picture(leases=(lease,), replicas=(going,), deployments=(wants(SHARD),)),
        plans.OPTIONS,
    )
    assert not asked(list(made.actions))
    assert not started(list(made.actions)), "not before the memory is free"
    assert any("replica r-" in note or "memory of lease" in note for note in made.notes)


def test_what_is_parked_takes_none_of_the_memory_that_replicas_have() -> None:
    """It has memory of its own: a parked model counted as if it ran, and its own lease was full for it."""
    lease = running(dataclasses.replace(SHARD, memory_gb=6.0), 1)
    slot, asleep = in_slot(lease, 0, "embed", asleep=True)
    parked = dataclasses.replace(asleep.replica, state=fleet.ReplicaState.ASLEEP)
    asleep = dataclasses.replace(asleep, replica=parked)
    lease = dataclasses.replace(lease, slots=(slot,))
    found = done(leases=(lease,), replicas=(asleep,), deployments=(wants(SHARD),))
    assert [type(each) for each in found] == [actions.WakeReplica]
