"""The one place where a plan takes effect: checks each action against newer state, acts, records.

The registry is written first, then the live picture, then agents hear of it: a broker that dies in
between leaves a wish that the next one carries out.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from sqlalchemy import exc

from scheduler.contracts import clock, fleet, ids, slurm
from scheduler.core import actions, plan, replicas, snapshot
from scheduler.runtime import entries, lease_acts, live, settings, startup, writeoff, writer
from scheduler.runtime.registry import cordons, database, store

log = logging.getLogger(__name__)
BY_US = "forebay"  # who cordons a node that no admin did
LAST_S = (
    5.0  # for what is still to be written down at the end: a registry that hangs is not waited for
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What became of one action: `outcome` is `done`, or `skipped: …` with the reason."""

    action: actions.Action
    outcome: str


class Applier:
    """Applies plans; see the module."""

    def __init__(
        self,
        picture: live.Live,
        registry: store.Registry,
        port: slurm.SlurmPort,
        renderer: lease_acts.LeaseRenderer,
        options: settings.Settings,
        time: clock.Clock,
        write_off: writeoff.WriteOff = writeoff.nowhere,
    ) -> None:
        self._live = picture
        self._registry = registry
        self._options = options
        self._time = time
        self._writes = writer.Writer(picture, registry, time, write_off)
        self._leases = lease_acts.LeaseActs(picture, self._writes, port, renderer, options, time)
        self._owed: set[ids.ReplicaId] = set()  # whose roles the registry does not know yet
        self._handlers: dict[type, Callable[[Any], Coroutine[Any, Any, None]]] = {
            actions.RequestLease: self._leases.request_lease,
            actions.AdoptLease: self._leases.adopt_lease,
            actions.FollowLease: self._leases.follow_lease,
            actions.CloseLease: self._leases.close_lease,
            actions.CancelJob: self._leases.cancel_job,
            actions.StartReplica: self._start_replica,
            actions.ParkReplica: self._park_replica,
            actions.WakeReplica: self._wake_replica,
            actions.AdoptReplica: self._adopt_replica,
            actions.StopReplica: self._stop_replica,
            actions.SetRole: self._set_role,
            actions.MarkLost: self._mark_lost,
            actions.CloseSlot: self._close_slot,
            actions.Quarantine: self._quarantine,
            actions.CordonNode: self._cordon_node,
        }

    async def apply(self, made: plan.Plan) -> tuple[Result, ...]:
        """Apply a plan's actions in order.

        Raises:
            database.Fenced: another broker leads.
            sqlalchemy.exc.SQLAlchemyError: the registry does not answer; what was not written has
                not happened and is planned again.
        """
        results: list[Result] = []
        for action in made.actions:
            try:
                await self._handlers[type(action)](action)
            except writer.Stale as stale:
                results.append(Result(action, f"skipped: {stale}"))
                continue
            except (database.Fenced, exc.SQLAlchemyError):
                raise
            except Exception as error:
                # One that can't be done must not keep those after it from being done, tick after tick.
                log.exception("%s: %s", type(action).__name__, describe(action))
                results.append(Result(action, f"failed: {type(error).__name__}: {error}"))
                continue
            log.info("%s: %s", type(action).__name__, describe(action))
            results.append(Result(action, "done"))
        self._live.ladder_memory = made.ladder_memory
        self._live.scale_memory = made.scale_memory
        self._live.lent_at = made.lent_at
        return tuple(results)

    def apply_unwritten(self, made: plan.Plan) -> None:
        """Do of a plan what needs no fence, while the registry does not answer; `flush` writes it down later.

        Agents follow the newest epoch alone: a role told by a leader that was replaced turns nothing.
        """
        for action in made.actions:
            try:
                if isinstance(action, actions.SetRole):
                    self._turn(action)
                elif isinstance(action, actions.MarkLost):
                    self._lose(action)
                else:
                    continue
            except writer.Stale:
                continue
            log.info("%s, not written down yet: %s", type(action).__name__, describe(action))
        self._live.ladder_memory = made.ladder_memory

    async def flush(self) -> None:
        """Write down what reports have changed since the last flush, and roles that were only told."""
        picture = self._live
        for replica_id in list(self._owed):
            await self._pay(replica_id)
        found = list(picture.news_replicas.values())
        slots = list(picture.news_slots.values())
        leases = list(picture.news_leases.values())
        if not (found or slots or leases):
            return
        for lease in leases:
            # Its newest word: what a plan has written since must not be undone by what was heard before.
            entry = picture.leases.get(lease.lease_id)
            if entry is not None or lease.state is fleet.LeaseState.ENDED:
                await self._writes.save_lease(entry.lease if entry is not None else lease)
        await asyncio.to_thread(
            self._registry.holdings.save_news,
            picture.epoch,
            found,
            slots,
            self._time.wall_us(),
        )
        # Only what was written is forgotten: more may have come in meanwhile.
        for replica in found:
            if picture.news_replicas.get(replica.replica_id) is replica:
                del picture.news_replicas[replica.replica_id]
        for slot in slots:
            if picture.news_slots.get(slot.slot_id) is slot:
                del picture.news_slots[slot.slot_id]
        for lease in leases:
            if picture.news_leases.get(lease.lease_id) is lease:
                del picture.news_leases[lease.lease_id]

    async def settle(self) -> None:
        """Wait until every call to Slurm that was begun has ended."""
        await self._leases.settle()

    async def close(self, seconds: float) -> None:
        """Give calls to Slurm so long to end, and write down what came of them."""
        await self._leases.close(seconds)
        try:
            async with asyncio.timeout(LAST_S):
                await self.flush()
        except (database.Fenced, exc.SQLAlchemyError, TimeoutError) as error:
            why = str(error) or f"the registry has not answered for {LAST_S:g} s"
            log.warning("not written down at the end, the next leader finds out: %s", why)

    async def _start_replica(self, action: actions.StartReplica) -> None:
        entry = self._writes.lease(action.lease_id)
        if entry.lease.state is not fleet.LeaseState.RUNNING or entry.leaving:
            raise writer.Stale(f"lease {action.lease_id} is {entry.leaving or entry.lease.state}")
        slot = self._slot_for(entry, action)
        now = self._time.monotonic()
        known = entries.ReplicaEntry(
            replica=fleet.Replica(
                replica_id=ids.ReplicaId(ids.short_id("r")),
                cluster=self._live.cluster,
                lease_id=action.lease_id,
                slot_id=slot.slot_id,
                slurm_job_id=entry.lease.slurm_job_id,
                node=entry.lease.nodes[0] if entry.lease.nodes else "",
                spec=action.spec.started,
                state=fleet.ReplicaState.STARTING,
                role=action.role,
                reason=action.reason,
            ),
            run=True,
            wanted_role=action.role,
            drain_s=self._options.drain_s,
            ordered=now,
            created_us=self._time.wall_us(),
            served=False,
            queue_s=startup.queue_s(entry),
            allocated=now if slot.state is replicas.SlotState.READY else None,
        )
        await self._writes.wish(entry, slot=slot, known=known)
        # Not the next one: what memory alone has moved it to meanwhile does not name the replica.
        known.revision = entry.revision
        entry.slots.setdefault(slot.slot_id, slot)  # it may be heard of by now
        self._live.replicas[known.replica.replica_id] = known
        self._live.wished()

    def _occupied(self) -> set[ids.SlotId]:
        """Return the slots that replicas are in, apart from what is parked there."""
        return {known.replica.slot_id for known in self._live.replicas.values() if not known.parked}

    def _slot_for(self, entry: entries.LeaseEntry, action: actions.StartReplica) -> snapshot.Slot:
        """Return the slot for a replica, after checking that its GPUs are free."""
        occupied = self._occupied()
        if action.slot_id is not None:
            slot = entry.slots.get(action.slot_id)
            if slot is None or slot.close or slot.slot_id in occupied or not slot.state.takes:
                raise writer.Stale(f"slot {action.slot_id} is not free any more")
            return slot
        taken = sum(slot.gpus for slot in entry.slots.values() if not slot.state.final)
        gpus = entry.lease.taken(action.spec.gpus)
        if action.spec.hardware.place != entry.lease.hardware.place:
            raise writer.Stale(f"lease {action.lease_id} is of other hardware")
        if taken + gpus > entry.lease.gpus:
            raise writer.Stale(f"lease {action.lease_id} has {entry.lease.gpus - taken} GPUs left")
        numbers = [int(slot_id.rsplit(".s", 1)[1]) for slot_id in entry.slots]
        return snapshot.Slot(
            slot_id=ids.SlotId(f"{action.lease_id}.s{max(numbers, default=-1) + 1}"),
            lease_id=action.lease_id,
            gpus=gpus,
            cpus=action.spec.hardware.cpus
            or self._options.slot_cpus * entry.lease.spread(action.spec.gpus),
        )

    async def _adopt_replica(self, action: actions.AdoptReplica) -> None:
        slot, replica = action.stranger.slot, action.stranger.replica
        entry = self._writes.lease(replica.lease_id)
        if replica.replica_id in self._live.replicas:
            raise writer.Stale("it is known by now")
        known = entries.ReplicaEntry(
            replica=replica,
            run=True,
            wanted_role=replica.role,
            drain_s=self._options.drain_s,
            ordered=self._time.monotonic(),
            created_us=self._time.wall_us(),
        )
        slot = entry.slots.get(slot.slot_id, slot)
        await self._writes.wish(entry, slot=slot, known=known)
        # Not the next one: what memory alone has moved it to meanwhile does not name the replica.
        known.revision = entry.revision
        entry.slots.setdefault(slot.slot_id, slot)  # it may be heard of by now
        entry.strangers = tuple(
            stranger
            for stranger in entry.strangers
            if stranger.replica.replica_id != replica.replica_id
        )
        self._live.replicas[replica.replica_id] = known
        self._live.wished()

    async def _stop_replica(self, action: actions.StopReplica) -> None:
        known = self._writes.replica(action.replica_id)
        if not known.run:
            raise writer.Stale("it is stopping by now")
        changed = dataclasses.replace(known, run=False, drain_s=action.drain_s)
        changed.replica = dataclasses.replace(known.replica, reason=action.reason)
        await self._writes.wish(self._writes.lease(known.replica.lease_id), known=changed)
        # Nothing but this applier changes wishes, but reports may have come in meanwhile.
        known.run, known.drain_s = False, action.drain_s
        if action.failed:
            spec = known.replica.spec
            self._live.fail((spec.model, spec.version), self._time.monotonic(), action.reason)
        self._live.wished()

    async def _park_replica(self, action: actions.ParkReplica) -> None:
        known = self._writes.replica(action.replica_id)
        if known.asleep or not known.run:
            raise writer.Stale("it is to be parked, or to stop, by now")
        changed = dataclasses.replace(known, asleep=True, drain_s=action.drain_s)
        await self._writes.wish(self._writes.lease(known.replica.lease_id), known=changed)
        known.asleep, known.drain_s = True, action.drain_s
        self._live.wished()

    async def _wake_replica(self, action: actions.WakeReplica) -> None:
        known = self._writes.replica(action.replica_id)
        entry = self._writes.lease(known.replica.lease_id)
        if not known.asleep or not known.run:
            raise writer.Stale("it is woken, or to stop, by now")
        others = {
            other.replica.replica_id
            for other in self._live.replicas.values()
            if other.replica.slot_id == known.replica.slot_id and not other.asleep
        }
        if entry.leaving or others:
            raise writer.Stale(f"its slot is not free: {entry.leaving or ', '.join(others)}")
        changed = dataclasses.replace(known, asleep=False, wanted_role=action.role)
        await self._writes.wish(entry, known=changed)
        known.asleep, known.wanted_role = False, action.role
        known.ordered, known.served = self._time.monotonic(), False
        known.queue_s, known.allocated, known.phases_s = 0.0, known.ordered, {}
        self._live.wished()

    async def _set_role(self, action: actions.SetRole) -> None:
        known = self._writes.replica(action.replica_id)
        if known.wanted_role is action.role:
            raise writer.Stale("it has that role by now")
        changed = dataclasses.replace(known, wanted_role=action.role)
        await self._writes.wish(self._writes.lease(known.replica.lease_id), known=changed)
        known.wanted_role, known.told = action.role, self._time.monotonic()
        self._live.wished()

    def _turn(self, action: actions.SetRole) -> None:
        """Tell a replica its role before that is written down."""
        known = self._writes.replica(action.replica_id)
        if known.wanted_role is action.role:
            raise writer.Stale("it has that role by now")
        known.wanted_role, known.told = action.role, self._time.monotonic()
        self._writes.lease(known.replica.lease_id).revision += 1
        self._owed.add(action.replica_id)
        self._live.wished()

    async def _pay(self, replica_id: ids.ReplicaId) -> None:
        """Write a role down that was only told."""
        self._owed.discard(replica_id)  # first: it may turn again while this is written
        known = self._live.replicas.get(replica_id)
        entry = None if known is None else self._live.leases.get(known.replica.lease_id)
        if known is None or entry is None:
            return
        try:
            await self._writes.wish(entry, known=known)
        except BaseException:
            self._owed.add(replica_id)
            raise
        self._live.wishes.ring()  # its lease has another number by now

    async def _mark_lost(self, action: actions.MarkLost) -> None:
        self._lose(action)

    def _lose(self, action: actions.MarkLost) -> None:
        known = self._writes.replica(action.replica_id)
        coming = {fleet.ReplicaState.STARTING, fleet.ReplicaState.WARM}
        held = self._live.leases.get(known.replica.lease_id)
        came = known.away is not None or known.replica.state not in coming
        if known.run and not came and held is not None and not held.leaving:
            # Its lease stands and it never came up: without a pause it would be tried again at once.
            spec = known.replica.spec
            self._live.fail((spec.model, spec.version), self._time.monotonic(), action.reason)
        self._live.finish(action.replica_id, replicas.ReplicaEvent.VANISHED, action.reason)

    async def _close_slot(self, action: actions.CloseSlot) -> None:
        entry = self._writes.lease(action.lease_id)
        slot = entry.slots.get(action.slot_id)
        occupied = self._occupied()
        if slot is None or slot.close or slot.state.final or slot.slot_id in occupied:
            raise writer.Stale(f"slot {action.slot_id} is not empty and open any more")
        closed = dataclasses.replace(slot, close=True)
        await self._writes.wish(entry, slot=closed)
        entry.slots[slot.slot_id] = dataclasses.replace(entry.slots[slot.slot_id], close=True)
        self._live.wished()

    async def _quarantine(self, action: actions.Quarantine) -> None:
        await asyncio.to_thread(
            self._registry.catalog.quarantine,
            self._live.epoch,
            action.model,
            action.version,
            action.until_us,
            action.reason,
        )
        self._live.failures.pop((action.model, action.version), None)
        self._live.deployments = tuple(
            dataclasses.replace(
                deployment,
                quarantined_until_us=action.until_us,
                quarantine_reason=action.reason,
            )
            if deployment.key == (action.model, action.version)
            else deployment
            for deployment in self._live.deployments
        )

    async def _cordon_node(self, action: actions.CordonNode) -> None:
        cordon = cordons.Cordon(
            action.node, action.reason, BY_US, self._time.wall_us(), action.until_us
        )
        await asyncio.to_thread(self._registry.cordons.add, cordon, epoch=self._live.epoch)
        self._live.cordons = {**self._live.cordons, action.node: cordon}


def describe(action: actions.Action) -> str:
    """Return one line: what an action is about, and why."""
    parts: list[str] = []
    for field in dataclasses.fields(action):
        value = getattr(action, field.name)
        if isinstance(value, slurm.Job):
            parts.append(f"job={value.job_id}")
        elif isinstance(value, fleet.ReplicaSpec):
            parts.append(f"model={value.model} version={value.version}")
        elif isinstance(value, snapshot.Stranger):
            parts.append(f"replica_id={value.replica.replica_id}")
        elif field.name != "reason" and value is not None:
            parts.append(f"{field.name}={value}")
    return f"{' '.join(parts)}: {action.reason}"
