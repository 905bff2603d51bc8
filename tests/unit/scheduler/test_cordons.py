"""Which nodes are kept off after a loss, and what that keeps off them."""

import dataclasses

from scheduler.contracts import fleet, slurm
from scheduler.core import actions, cordons, plan, snapshot
from scheduler.runtime import settings
from tests.unit.scheduler import plans

OPTIONS = settings.Settings()
LOST_S = OPTIONS.agent_lost_s + 1


def held(number: int, silent_s: float | None = 0.1) -> snapshot.HeldLease:
    made = plans.held(number, silent_s=silent_s)
    lease = dataclasses.replace(made.lease, nodes=(f"n{number}",), slurm_job_id=str(number))
    return dataclasses.replace(made, lease=lease)


def picture(*leases: snapshot.HeldLease, **more: object) -> snapshot.Snapshot:
    jobs = tuple(plans.job(int(each.lease.slurm_job_id)) for each in leases)
    return dataclasses.replace(plans.picture(leases=leases, jobs=jobs), **more)  # type: ignore[arg-type]


def test_a_node_that_took_its_agent_with_it_is_cordoned_and_said_why() -> None:
    snap = picture(held(1, LOST_S), held(2), held(3))
    (cordon,) = cordons.suspects(snap, OPTIONS)
    assert (cordon.node, cordon.until_us) == ("n1", snap.now_us + 1_800_000_000)
    assert cordon.reason == "lease l-000000000001: agent silent for 31 s"
    assert not list(cordons.suspects(picture(held(1, LOST_S - 2), held(2)), OPTIONS))
    assert not list(cordons.suspects(picture(held(1, None), held(2)), OPTIONS)), "none ever came"
    off = dataclasses.replace(OPTIONS, cordon_s=0.0)
    assert not list(cordons.suspects(snap, off))
    again = dataclasses.replace(snap, cordoned=frozenset({"n1"}))
    assert not list(cordons.suspects(again, OPTIONS))


def test_silence_of_most_is_our_own_fault_and_what_slurm_states_is_not() -> None:
    silent = picture(held(1, LOST_S), held(2, LOST_S), held(3))
    assert not list(cordons.suspects(silent, OPTIONS))
    failed = dataclasses.replace(plans.job(1), state=slurm.JobState.NODE_FAIL)
    stated = dataclasses.replace(silent, jobs=(failed, *(silent.jobs or ())[1:]))
    assert [cordon.node for cordon in cordons.suspects(stated, OPTIONS)] == ["n1"]
    assert not list(cordons.suspects(dataclasses.replace(stated, jobs=None), OPTIONS))


def test_the_last_node_is_never_cordoned() -> None:
    nodes = tuple(
        slurm.Node(name, "idle", frozenset(), True, ("serve",), 4, 4) for name in ("n1", "n2")
    )
    one = picture(held(1, LOST_S), nodes=nodes, cordoned=frozenset({"n2"}))
    assert not list(cordons.suspects(one, OPTIONS))


def test_the_last_node_that_could_hold_the_lease_is_never_cordoned() -> None:
    """A node without GPUs beside it took all callers' place away for half an hour."""
    gpus = slurm.Node("n1", "idle", frozenset(), True, ("serve",), 4, 4)
    without = dataclasses.replace(gpus, name="login", gpus=0, gpus_free=0)
    assert not list(cordons.suspects(picture(held(1, LOST_S), nodes=(gpus, without)), OPTIONS))
    other = dataclasses.replace(gpus, name="n2")
    (cordon,) = cordons.suspects(picture(held(1, LOST_S), nodes=(gpus, other, without)), OPTIONS)
    assert cordon.node == "n1"


def test_nothing_new_goes_to_a_cordoned_node() -> None:
    snap = picture(held(1), cordoned=frozenset({"n1"}), deployments=(plans.deployment(),))
    (ask,) = plan.plan(snap, OPTIONS).actions
    assert isinstance(ask, actions.RequestLease)
    assert ask.exclude == ("n1",)
    free = dataclasses.replace(snap, cordoned=frozenset())
    (start,) = plan.plan(free, OPTIONS).actions
    assert isinstance(start, actions.StartReplica)
    assert free.leases[0].lease.state is fleet.LeaseState.RUNNING


def test_what_was_on_a_lost_node_is_written_off_though_slurm_still_names_its_job() -> None:
    slot = plans.slot()
    lost = dataclasses.replace(plans.held(1, fleet.LeaseState.CLOSING), silent_s=LOST_S)
    picture = plans.picture(
        leases=(dataclasses.replace(lost, slots=(slot,)),),
        replicas=(plans.known(1, slot),),
        jobs=(plans.job(1),),
    )
    marked = [a for a in plan.plan(picture, OPTIONS).actions if isinstance(a, actions.MarkLost)]
    assert [action.replica_id for action in marked] == [plans.known(1, slot).replica.replica_id]
    speaks = dataclasses.replace(lost, slots=(slot,), silent_s=0.1)
    drains = dataclasses.replace(picture, leases=(speaks,))
    assert not [a for a in plan.plan(drains, OPTIONS).actions if isinstance(a, actions.MarkLost)]
