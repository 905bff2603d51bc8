"""Snapshots for planner tests, and a model of what applying a plan does."""

import dataclasses

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import actions, plan, replicas, snapshot
from scheduler.runtime import settings

OPTIONS = settings.Settings()
ELASTIC = dataclasses.replace(OPTIONS, rungs=(0, 1, 2, 3), scale_fill=0.7)
CLUSTER = "alpha"


def spec(model: str = "chat", gpus: int = 4) -> fleet.ReplicaSpec:
    return fleet.ReplicaSpec(model, "v1", fleet.EngineKind.SIMULATED, gpus=gpus)


def deployment(model: str = "chat", replicas: int = 1, gpus: int = 4) -> snapshot.Deployment:
    return snapshot.Deployment(spec(model, gpus), replicas)


def lease(
    number: int = 1,
    state: fleet.LeaseState = fleet.LeaseState.RUNNING,
    gpus: int = 4,
) -> fleet.Lease:
    return fleet.Lease(
        lease_id=ids.LeaseId(f"l-{number:012x}"),
        cluster=CLUSTER,
        kind=fleet.LeaseKind.SERVE,
        team="forebay",
        state=state,
        gpus=gpus,
        slurm_job_id=str(number) if state is not fleet.LeaseState.REQUESTED else "",
        nodes=(f"n{number}",),
    )


def held(
    number: int = 1,
    state: fleet.LeaseState = fleet.LeaseState.RUNNING,
    gpus: int = 4,
    silent_s: float | None = 0.1,
) -> snapshot.HeldLease:
    return snapshot.HeldLease(lease(number, state, gpus), silent_s=silent_s)


def slot(number: int = 1, which: int = 0, gpus: int = 4) -> snapshot.Slot:
    lease_id = lease(number).lease_id
    return snapshot.Slot(
        ids.SlotId(f"{lease_id}.s{which}"), lease_id, gpus, state=replicas.SlotState.READY
    )


def known(
    number: int,
    in_slot: snapshot.Slot,
    model: str = "chat",
    state: fleet.ReplicaState = fleet.ReplicaState.SERVING,
) -> snapshot.KnownReplica:
    replica = fleet.Replica(
        replica_id=ids.ReplicaId(f"r-{number:012x}"),
        cluster=CLUSTER,
        lease_id=in_slot.lease_id,
        slot_id=in_slot.slot_id,
        slurm_job_id="1",
        node="n1",
        spec=spec(model, in_slot.gpus),
        state=state,
        role=fleet.Role.SHARED,
    )
    return snapshot.KnownReplica(replica, True, fleet.Role.SHARED, age_s=100.0 + number)


def job(
    number: int,
    state: slurm.JobState = slurm.JobState.RUNNING,
    cluster: str = CLUSTER,
) -> slurm.Job:
    stamp = slurm.Stamp(cluster, lease(number).lease_id, "serve", "forebay")
    return slurm.Job(
        job_id=ids.SlurmJobId(str(number)),
        cluster=cluster,
        name="forebay",
        user="forebay",
        account="forebay",
        partition="serve",
        state=state,
        stamp=stamp,
        nodes=(f"n{number}",) if state is slurm.JobState.RUNNING else (),
        gpus=4,
    )


def picture(**parts: object) -> snapshot.Snapshot:
    base = snapshot.Snapshot(now=1000.0, now_us=1_000_000_000, cluster=CLUSTER, jobs=())
    return dataclasses.replace(base, **parts)  # type: ignore[arg-type] # the test's own fields


def do(snap: snapshot.Snapshot) -> list[actions.Action]:
    return list(plan.plan(snap, OPTIONS).actions)


class World:
    """Applies plans to a snapshot as an obedient applier, agents and Slurm would, some of it later."""

    def __init__(self, snap: snapshot.Snapshot) -> None:
        self.snap = snap
        self.number = 10_000

    def think(self) -> plan.Plan:
        return plan.plan(self.snap, OPTIONS)

    def apply(self, made: plan.Plan) -> None:
        """Let every wish be noted; nothing has happened in the world yet."""
        for action in made.actions:
            self._apply(action)
        self.snap = dataclasses.replace(self.snap, ladder_memory=made.ladder_memory)

    def _apply(self, action: actions.Action) -> None:
        snap = self.snap
        if isinstance(action, actions.RequestLease):
            self.number += 1
            new = held(self.number, fleet.LeaseState.REQUESTED, action.gpus, None)
            self.snap = dataclasses.replace(snap, leases=(*snap.leases, new))
        elif isinstance(action, actions.AdoptLease):
            assert action.job.stamp is not None
            new = held(int(action.job.job_id), gpus=action.job.gpus or 0, silent_s=None)
            self.snap = dataclasses.replace(snap, leases=(*snap.leases, new))
        elif isinstance(action, actions.FollowLease):
            self._lease(action.lease_id, action.event)
        elif isinstance(action, actions.CloseLease):
            self._lease(action.lease_id, replicas.LeaseEvent.CLOSED)
        elif isinstance(action, actions.CancelJob):
            self.snap = dataclasses.replace(snap, cancels={**snap.cancels, action.job_id: 0.0})
        elif isinstance(action, actions.StartReplica):
            self._start(action)
        elif isinstance(action, actions.StopReplica):
            self._replica(action.replica_id, run=False)
        elif isinstance(action, actions.SetRole):
            self._replica(action.replica_id, wanted_role=action.role)
        elif isinstance(action, actions.MarkLost):
            kept = tuple(r for r in snap.replicas if r.replica.replica_id != action.replica_id)
            self.snap = dataclasses.replace(snap, replicas=kept)
        elif isinstance(action, actions.CloseSlot):
            self._close_slot(action.slot_id)
        elif isinstance(action, actions.Quarantine):
            kept_deployments = tuple(
                dataclasses.replace(
                    item, quarantined_until_us=action.until_us, quarantine_reason=action.reason
                )
                if item.key == (action.model, action.version)
                else item
                for item in snap.deployments
            )
            self.snap = dataclasses.replace(snap, deployments=kept_deployments)
        elif isinstance(action, actions.CordonNode):
            self.snap = dataclasses.replace(snap, cordoned=snap.cordoned | {action.node})
        else:
            assert isinstance(action, actions.AdoptReplica), action

    def _lease(self, lease_id: ids.LeaseId, event: replicas.LeaseEvent) -> None:
        leases = []
        for item in self.snap.leases:
            if item.lease.lease_id != lease_id:
                leases.append(item)
                continue
            state = replicas.lease_after(item.lease.state, event)
            if state is not fleet.LeaseState.ENDED:
                changed = dataclasses.replace(item.lease, state=state)
                leases.append(dataclasses.replace(item, lease=changed, held_s=0.0))
        gone = {item.lease.lease_id for item in self.snap.leases} - {
            item.lease.lease_id for item in leases
        }
        self.snap = dataclasses.replace(
            self.snap, leases=tuple(leases), ended=self.snap.ended | gone
        )

    def _start(self, action: actions.StartReplica) -> None:
        self.number += 1
        slots = [item for lease in self.snap.leases for item in lease.slots]
        found = next((item for item in slots if item.slot_id == action.slot_id), None)
        if found is None:
            lease_id = action.lease_id
            found = snapshot.Slot(
                ids.SlotId(f"{lease_id}.s{self.number}"), lease_id, action.spec.gpus
            )
            self._replace_slots(lease_id, lambda before: (*before, found))
        new = known(self.number, found, action.spec.model, fleet.ReplicaState.STARTING)
        replica = dataclasses.replace(new.replica, spec=action.spec)
        new = dataclasses.replace(new, replica=replica, wanted_role=action.role, age_s=0.0)
        self.snap = dataclasses.replace(self.snap, replicas=(*self.snap.replicas, new))

    def _replica(self, replica_id: ids.ReplicaId, **changes: object) -> None:
        self.snap = dataclasses.replace(
            self.snap,
            replicas=tuple(
                dataclasses.replace(item, **changes)  # type: ignore[arg-type] # the test's own fields
                if item.replica.replica_id == replica_id
                else item
                for item in self.snap.replicas
            ),
        )

    def _close_slot(self, slot_id: ids.SlotId) -> None:
        for item in self.snap.leases:
            self._replace_slots(
                item.lease.lease_id,
                lambda before: tuple(
                    dataclasses.replace(one, close=True) if one.slot_id == slot_id else one
                    for one in before
                ),
            )

    def _replace_slots(self, lease_id: ids.LeaseId, change: object) -> None:
        assert callable(change)
        self.snap = dataclasses.replace(
            self.snap,
            leases=tuple(
                dataclasses.replace(item, slots=change(item.slots))
                if item.lease.lease_id == lease_id
                else item
                for item in self.snap.leases
            ),
        )
