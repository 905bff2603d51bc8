"""Which leases are asked for: successors, windows, cordoned nodes, and replicas over several nodes."""

import dataclasses
import math

import pytest

from scheduler.contracts import fleet, slurm
from scheduler.core import (
    actions,
    grounds,
    members,
    packing,
    placement,
    plan,
    rollover,
    snapshot,
    windows,
)
from tests.unit.scheduler import plans


def test_leases_that_end_are_replaced_a_few_at_a_time_and_in_time() -> None:
    held = [dataclasses.replace(plans.held(n), left_s=600.0 + n) for n in range(1, 9)]
    far = dataclasses.replace(plans.held(9), left_s=90_000.0)
    snap = plans.picture(leases=(*held, far))
    rolling = rollover.rolling(snap, plans.ELASTIC)
    assert rolling == {held[0].lease.lease_id, held[1].lease.lease_id}
    assert not rollover.rolling(plans.picture(leases=(far,)), plans.ELASTIC)
    window = windows.Window("patch day", 500.0, 5000.0, frozenset({"n9"}))
    snap = plans.picture(leases=(far,), closures=(window,))
    assert rollover.rolling(snap, plans.ELASTIC) == {far.lease.lease_id}


def test_a_successor_comes_a_measured_start_before_the_end() -> None:
    deployment = plans.deployment()  # fixed in number: its starts are measured all the same
    due = 2 * 40.0 + plans.ELASTIC.drain_s
    for left, rolls in ((due + 1, False), (due - 1, True)):
        held = dataclasses.replace(plans.held(), left_s=left)
        snap = plans.picture(
            deployments=(deployment,), leases=(held,), starts={deployment.key: 40.0}
        )
        assert bool(rollover.rolling(snap, plans.ELASTIC)) is rolls
    short = dataclasses.replace(plans.held().lease, walltime_s=60)
    for left, rolls in ((31.0, False), (29.0, True)):
        held = dataclasses.replace(plans.held(), lease=short, left_s=left)
        snap = plans.picture(deployments=(deployment,), leases=(held,))
        assert bool(rollover.rolling(snap, plans.ELASTIC)) is rolls, (
            "no start has been measured yet"
        )


def test_a_window_elsewhere_and_one_that_is_over_touch_nothing() -> None:
    window = windows.Window("rack", 100.0, 200.0, frozenset({"n1"}))
    assert windows.until([window], ["n2"]) == (math.inf, "")
    assert windows.until([window], ["n1"])[0] == 100.0
    assert windows.until([window])[0] == 100.0  # an ask does not know its nodes yet
    assert windows.until([dataclasses.replace(window, starts_s=-9.0, ends_s=0.0)])[0] == math.inf


def test_no_lease_is_asked_for_that_would_cross_a_window() -> None:
    soon = windows.Window("patch day", 3600.0, 7200.0)
    options = dataclasses.replace(plans.ELASTIC, lease_time_min_s=1800)
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
    made = plan.plan(dataclasses.replace(picture, nodes=nodes), plans.ELASTIC)
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
    (ask,) = plan.plan(kept_off, plans.ELASTIC).actions
    assert isinstance(ask, actions.RequestLease)
    assert (ask.walltime_s, ask.exclude) == (7200, ("n1",))


def test_where_every_node_is_cordoned_nothing_is_asked_for() -> None:
    """Slurm would refuse each ask: it could start nowhere."""
    picture = plans.picture(deployments=(plans.deployment(),), nodes=(node("n1"), node("n2")))
    made = plan.plan(dataclasses.replace(picture, cordoned=frozenset({"n1", "n2"})), plans.ELASTIC)
    assert not made.actions
    assert "every node that would do is cordoned" in made.notes[0]


FOREIGN = {
    "another partition": {"partitions": ("gpu-guests",)},
    "another type": {"gres_type": "a100"},
    "another feature": {"features": ("ib",)},
    "no shards": {"shared": {}},
    "too few CPUs": {"cpus": 8},
    "too little memory": {"memory_mb": 32_000},
}


@pytest.mark.parametrize("other", [*FOREIGN, "alike"])
def test_a_node_that_could_not_hold_the_lease_makes_it_no_longer(other: str) -> None:
    """The whole walltime was asked for, and Slurm let it wait for the end of maintenance."""
    hardware = fleet.Hardware("shard", "H100", 4, memory_gb=64.0, cpus=16, constraint="nvlink")
    spec = dataclasses.replace(plans.spec(gpus=1), hardware=hardware)
    ours = dataclasses.replace(
        node("n1"), cpus=64, memory_mb=512_000, gres_type="h100", shared={"shard": 16},
        features=("nvlink", "ib"),
    )  # fmt: skip
    theirs = dataclasses.replace(ours, name="n2", **FOREIGN.get(other, {}))  # type: ignore[arg-type] # a table
    rack = windows.Window("rack 1", 7300.0, 9000.0, frozenset({"n1"}))
    snap = plans.picture(
        deployments=(dataclasses.replace(plans.deployment(), spec=spec),),
        nodes=(ours, theirs),
        closures=(rack,),
        where=grounds.Grounds(serve=("serve",)),
    )
    (ask,) = plan.plan(snap, plans.ELASTIC).actions
    assert isinstance(ask, actions.RequestLease)
    assert ask.walltime_s == (0 if other == "alike" else 7200)
    # Where the one that could is cordoned, nothing is asked for: it could start nowhere.
    made = plan.plan(dataclasses.replace(snap, cordoned=frozenset({"n1"})), plans.ELASTIC)
    assert bool(made.actions) is (other == "alike")


def test_what_the_site_asks_of_nodes_counts_and_each_kind_has_its_partitions() -> None:
    where = grounds.Grounds(("serve",), ("backfill",), "H100", "nvlink&ib")
    both = ("serve", "backfill")
    nodes = [
        dataclasses.replace(
            node("n1"), partitions=both, gres_type="h100", features=("ib", "nvlink")
        ),
        dataclasses.replace(node("n2"), partitions=both, gres_type="a100", features=None),
        dataclasses.replace(node("n3"), partitions=("backfill",), features=None),
        dataclasses.replace(node("n4"), partitions=both, features=("ib",)),
        dataclasses.replace(node("n5"), partitions=(), gpus=None),
    ]

    def able(kind: fleet.LeaseKind, hardware: fleet.Hardware, units: int) -> list[str]:
        wanted = grounds.Wanted(kind, hardware, units)
        return [each.name for each in grounds.able(nodes, wanted, where)]

    serve, backfill = fleet.LeaseKind.SERVE, fleet.LeaseKind.BACKFILL
    assert able(serve, fleet.ANY_NODE, 4) == ["n1"]
    assert able(backfill, fleet.ANY_NODE, 4) == ["n1", "n3"]
    assert able(serve, fleet.ANY_NODE, 5) == []
    assert able(serve, fleet.Hardware("none", constraint="ib"), 0) == ["n1", "n2", "n4", "n5"]
    two = grounds.Wanted(serve, fleet.ANY_NODE, 8, 2)
    assert [each.name for each in grounds.able(nodes, two, where)] == ["n1"]


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
    kinds = [type(each).__name__ for each in plan.plan(picture, plans.ELASTIC).actions]
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
    made = plan.plan(picture, plans.ELASTIC)
    kinds = [type(each).__name__ for each in made.actions]
    assert kinds.count("CloseLease") == kinds.count("RequestLease") == 1
    (close,) = (each for each in made.actions if isinstance(each, actions.CloseLease))
    assert "patch day" in close.reason
    short = dataclasses.replace(
        waiting, lease=dataclasses.replace(waiting.lease, walltime_s=7200, time_min_s=630)
    )
    made = plan.plan(dataclasses.replace(picture, leases=(short,)), plans.ELASTIC)
    assert not [each for each in made.actions if isinstance(each, actions.CloseLease)]


def test_a_replica_larger_than_a_node_asks_for_whole_nodes() -> None:
    options = dataclasses.replace(plans.ELASTIC, node_gpus=8)
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
    options = dataclasses.replace(plans.ELASTIC, node_gpus=8)
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
    options = dataclasses.replace(plans.ELASTIC, node_gpus=8)
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
    options = dataclasses.replace(plans.ELASTIC, node_gpus=8, lease_gpus=24)
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
