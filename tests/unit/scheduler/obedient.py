"""A world that does what plans say: Slurm starts what fits, agents obey, and demand stays as it is."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import actions, plan, replicas, snapshot
from tests.unit.scheduler import plans

S = fleet.ReplicaState


class Obedient:
    """Carries out one plan after the other.

    Args:
        snap: how it begins.
        options: the planner's settings.
        gpus: that Slurm really has for us.
        stuck: kinds of leases that it never starts.
    """

    def __init__(
        self,
        snap: snapshot.Snapshot,
        options: plan.Settings,
        gpus: int,
        stuck: Collection[fleet.LeaseKind] = (),
    ) -> None:
        self.snap = snap
        self._options = options
        self._gpus = gpus
        self._stuck = stuck
        self._number = 5_000

    def round(self, seconds: float) -> plan.Plan:
        """Plan once, do it, and let time pass until all of it has happened."""
        made = plan.plan(self.snap, self._options)
        for action in made.actions:
            self._apply(action)
        self.snap = dataclasses.replace(
            self.snap,
            ladder_memory=made.ladder_memory,
            scale_memory=made.scale_memory,
            lent_at=made.lent_at,
        )
        self._pass(seconds)
        return made

    def awake(self) -> Mapping[tuple[str, str], int]:
        """Return how many replicas of each deployment are up."""
        found: dict[tuple[str, str], int] = {}
        for known in self.snap.replicas:
            if known.awake:
                found[known.key] = found.get(known.key, 0) + 1
        return found

    def _apply(self, action: actions.Action) -> None:
        match action:
            case actions.RequestLease():
                self._ask(action)
            case actions.CloseLease():
                closing = fleet.LeaseState.CLOSING
                self._change(action.lease_id, lambda held: _in_state(held, closing))
            case actions.StartReplica():
                self._start(action)
            case actions.StopReplica():
                self._tell(action.replica_id, run=False)
            case actions.ParkReplica():
                self._tell(action.replica_id, asleep=True)
            case actions.WakeReplica():
                self._tell(action.replica_id, asleep=False, wanted_role=action.role, age_s=0.0)
            case actions.SetRole():
                self._tell(action.replica_id, wanted_role=action.role)
            case actions.CloseSlot():
                slot_id = action.slot_id
                self._change(action.lease_id, lambda held: _closing(held, slot_id))
            case _:
                raise AssertionError(f"nothing has happened that calls for {action}")

    def _ask(self, action: actions.RequestLease) -> None:
        self._number += 1
        base = plans.held(self._number, fleet.LeaseState.PENDING, action.gpus, None)
        lease = dataclasses.replace(
            base.lease,
            kind=action.kind,
            nodes=(),
            exclude=action.exclude,
            hardware=action.hardware,
        )
        held = dataclasses.replace(base, lease=lease)
        self.snap = dataclasses.replace(self.snap, leases=(*self.snap.leases, held))

    def _start(self, action: actions.StartReplica) -> None:
        self._number += 1
        (held,) = (h for h in self.snap.leases if h.lease.lease_id == action.lease_id)
        slot = next((s for s in held.slots if s.slot_id == action.slot_id), None)
        if slot is None:
            slot_id = ids.SlotId(f"{action.lease_id}.s{self._number}")
            slot = snapshot.Slot(
                slot_id, action.lease_id, action.spec.gpus, state=replicas.SlotState.READY
            )
            assert sum(s.gpus for s in held.slots) + slot.gpus <= held.lease.gpus
            slots = (*held.slots, slot)
            self._change(action.lease_id, lambda held: dataclasses.replace(held, slots=slots))
        others = [k for k in self.snap.replicas if k.replica.slot_id == slot.slot_id]
        assert all(known.parked for known in others)
        made = plans.known(self._number, slot, action.spec.model, S.STARTING)
        replica = dataclasses.replace(made.replica, role=action.role, spec=action.spec)
        made = dataclasses.replace(made, replica=replica, wanted_role=action.role, age_s=0.0)
        self.snap = dataclasses.replace(self.snap, replicas=(*self.snap.replicas, made))

    def _tell(self, replica_id: ids.ReplicaId, **changes: object) -> None:
        self.snap = dataclasses.replace(
            self.snap,
            replicas=tuple(
                dataclasses.replace(known, **changes)  # type: ignore[arg-type] # of this module
                if known.replica.replica_id == replica_id
                else known
                for known in self.snap.replicas
            ),
        )

    def _change(
        self, lease_id: ids.LeaseId, change: Callable[[snapshot.HeldLease], snapshot.HeldLease]
    ) -> None:
        self.snap = dataclasses.replace(
            self.snap,
            leases=tuple(
                change(held) if held.lease.lease_id == lease_id else held
                for held in self.snap.leases
            ),
        )

    def _pass(self, seconds: float) -> None:
        snap = self.snap
        closing = {
            held.lease.lease_id
            for held in snap.leases
            if held.lease.state is fleet.LeaseState.CLOSING
        }
        closed = {slot.slot_id for held in snap.leases for slot in held.slots if slot.close}
        living = tuple(
            _obeyed(known, seconds)
            for known in snap.replicas
            if known.run
            and known.replica.lease_id not in closing
            and known.replica.slot_id not in closed
        )
        holding = {known.replica.lease_id for known in living}
        leases: list[snapshot.HeldLease] = []
        for held in self._started(h for h in snap.leases if h.lease.lease_id not in closing):
            running = held.lease.state is fleet.LeaseState.RUNNING
            idle = running and held.lease.lease_id not in holding
            leases.append(
                dataclasses.replace(
                    held,
                    held_s=held.held_s + seconds,
                    idle_s=held.idle_s + seconds if idle else 0.0,
                    slots=tuple(slot for slot in held.slots if not slot.close),
                )
            )
        self.snap = dataclasses.replace(
            snap,
            now=snap.now + seconds,
            now_us=snap.now_us + round(seconds * 1e6),
            replicas=living,
            leases=tuple(leases),
            jobs=tuple(job_of(held) for held in leases),
        )

    def _started(self, leases: Iterable[snapshot.HeldLease]) -> list[snapshot.HeldLease]:
        """Let Slurm start what fits."""
        found = list(leases)
        used = sum(h.lease.gpus for h in found if h.lease.state is fleet.LeaseState.RUNNING)
        for place, held in enumerate(found):
            lease = held.lease
            waits = lease.state is fleet.LeaseState.PENDING and lease.kind not in self._stuck
            if waits and used + lease.gpus <= self._gpus:
                used += lease.gpus
                lease = dataclasses.replace(lease, nodes=(f"n{lease.slurm_job_id}",))
                found[place] = dataclasses.replace(
                    _in_state(
                        dataclasses.replace(held, lease=lease, silent_s=0.1),
                        fleet.LeaseState.RUNNING,
                    ),
                    held_s=0.0,
                )
        return found


def job_of(held: snapshot.HeldLease) -> slurm.Job:
    """Return the Slurm job of a lease."""
    running = held.lease.state is fleet.LeaseState.RUNNING
    state = slurm.JobState.RUNNING if running else slurm.JobState.PENDING
    return plans.job(int(held.lease.slurm_job_id), state)


def _in_state(held: snapshot.HeldLease, state: fleet.LeaseState) -> snapshot.HeldLease:
    return dataclasses.replace(held, lease=dataclasses.replace(held.lease, state=state))


def _closing(held: snapshot.HeldLease, slot_id: ids.SlotId) -> snapshot.HeldLease:
    slots = (
        dataclasses.replace(slot, close=True) if slot.slot_id == slot_id else slot
        for slot in held.slots
    )
    return dataclasses.replace(held, slots=tuple(slots))


def _obeyed(known: snapshot.KnownReplica, seconds: float) -> snapshot.KnownReplica:
    """Return a replica that has become what it was told to be."""
    state = S.SERVING if known.awake else S.ASLEEP
    stats = fleet.ReplicaStats(0, seats=8) if known.awake else None
    replica = dataclasses.replace(known.replica, state=state, role=known.wanted_role, stats=stats)
    return dataclasses.replace(
        known,
        replica=replica,
        asleep=not known.awake,
        age_s=known.age_s + seconds,
        told_s=known.told_s + seconds,
        stats_age_s=0.1,
    )
