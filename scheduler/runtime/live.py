"""What the leading broker knows now: the registry's memory merged with what agents and Slurm say.

Owned by the event loop: only the applier changes wishes, only reports and polls change facts. It
decides nothing; a snapshot of it goes to the planner.
"""

import collections
import dataclasses
import logging
from collections.abc import Mapping

from scheduler.contracts import fleet, ids, ports, slurm
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import autoscale, backoff, floors, ladder, replicas, rollouts, snapshot
from scheduler.runtime import (
    arrivals,
    entries,
    forecasts,
    hosts,
    node_weights,
    reported,
    scaling,
    startup,
)
from scheduler.runtime.registry import cordons, holdings, wishes

log = logging.getLogger(__name__)
TRIALS_KEPT = 20_000  # how requests fared, between two looks at the rollouts
LAST = (1 << 63) - 1  # a revision that none comes after
GONE_KEPT = 10_000  # replicas that have ended and that a late report may still name


class Live:
    """The leader's picture.

    Attributes:
        bell: rings with every change that a gateway should hear of.
        heard: rings with every report, news or not, and when an agent or a gateway leaves.
        wishes: rings when the desired state of a lease may have changed.
        settled: false while a new leader waits for agents to come back.
    """

    def __init__(self, epoch: int, cluster: str, pauses: entries.Pauses, now: float) -> None:
        self.epoch = epoch
        self.cluster = cluster
        self.outranked_by = epoch  # the newest epoch that an agent follows
        self.pauses = pauses
        self.started = now
        self.settled = False
        self.bell = entries.Bell()
        self.wishes = entries.Bell()
        self.heard = entries.Bell()
        # Revisions of one epoch start above every revision of the epochs before.
        self.revision = epoch << 32
        self.leases: dict[ids.LeaseId, entries.LeaseEntry] = {}
        self.replicas: dict[ids.ReplicaId, entries.ReplicaEntry] = {}
        self.gone: dict[ids.ReplicaId, None] = {}
        self.ended: set[ids.LeaseId] = set()
        self.cancels: dict[ids.SlurmJobId, float] = {}
        self.deployments: tuple[snapshot.Deployment, ...] = ()
        self.routes: Mapping[str, fleet.Route] = {}
        self.rollouts: tuple[rollouts.Rollout, ...] = ()
        self.trials: collections.deque[fleet.Trial] = collections.deque(maxlen=TRIALS_KEPT)
        self.demand: dict[str, tuple[float, dict[str, fleet.Demand]]] = {}
        self.gateways = hosts.Hosts()
        self.failures: dict[tuple[str, str], backoff.Failures] = {}
        self.lease_pause = backoff.Failures()
        self.ladder_memory: Mapping[str, ladder.Memory] = {}
        self.scale_memory: Mapping[tuple[str, str], autoscale.Memory] = {}
        self.lent_at: float | None = None
        self.batch_work: Mapping[str, ports.BatchWork] = {}
        self.cordons: Mapping[str, cordons.Cordon] = {}
        self.scheduled: tuple[floors.Floor, ...] = ()
        self.learned = forecasts.Learned()
        self.standing = wishes.Standing()
        self.weights = node_weights.NodeWeights()
        self.starts = scaling.Starts()
        self.rates = arrivals.Rates()
        self.jobs: tuple[slurm.Job, ...] | None = None
        self.nodes: tuple[slurm.Node, ...] = ()
        self.reservations: tuple[slurm.Reservation, ...] = ()
        self.hung_up: set[ids.LeaseId] = set()  # agents that left since the last tick
        self.polls = 0
        self.polled = float("-inf")
        self.news_replicas: dict[ids.ReplicaId, fleet.Replica] = {}
        self.news_slots: dict[ids.SlotId, snapshot.Slot] = {}
        self.news_leases: dict[ids.LeaseId, fleet.Lease] = {}

    def restore(self, held: holdings.Held, now: float) -> None:
        """Take up what the registry says is open."""
        for lease in held.leases:
            self.leases[lease.lease_id] = entries.LeaseEntry(
                lease, since=now, revision=held.revisions[lease.lease_id], idle_since=now
            )
        for slot in held.slots:
            self.leases[slot.lease_id].slots[slot.slot_id] = slot
        for row in held.replicas:
            self.replicas[row.replica.replica_id] = entries.ReplicaEntry(
                replica=row.replica,
                run=row.run,
                wanted_role=row.wanted_role,
                drain_s=row.drain_s,
                ordered=now,
                revision=held.revisions.get(row.replica.lease_id, 0),
                created_us=row.created_us,
                drain_asked=row.drain_asked,
                asleep=row.asleep,
            )
        self.ended |= held.ended

    def touch(self) -> None:
        """Note a change and wake who waits for one."""
        self.revision += 1
        self.bell.ring()

    def wished(self) -> None:
        """Note a change that agents must hear of too."""
        self.touch()
        self.wishes.ring()

    def absorb_poll(
        self,
        jobs: tuple[slurm.Job, ...] | None,
        nodes: tuple[slurm.Node, ...],
        began: float,
    ) -> None:
        """Take Slurm's answer to a poll that began at ``began``; None: it did not answer."""
        self.jobs = jobs
        if jobs is None:
            return
        self.polls += 1
        self.polled = began
        self.nodes = nodes
        named = {job.job_id for job in jobs}
        stamped = {job.stamp.lease_id: job for job in jobs if job.stamp is not None}
        for entry in self.leases.values():
            lease = entry.lease
            if ids.SlurmJobId(lease.slurm_job_id) in named or lease.lease_id in stamped:
                entry.absent_polls = 0
            elif not entry.submitting and began > entry.since:
                entry.absent_polls += 1
            job = stamped.get(lease.lease_id)
            if job is not None and job.state is slurm.JobState.RUNNING:
                self._timed(entry, job)

    def _timed(self, entry: entries.LeaseEntry, job: slurm.Job) -> None:
        """Take the times that Slurm gave a lease: a limit, a least walltime or an admin shortens it."""
        lease = entry.lease
        timed = dataclasses.replace(
            lease,
            started_us=lease.started_us or job.started_us,
            walltime_s=job.time_limit_s or lease.walltime_s,
        )
        if timed != lease:
            entry.lease = self.news_leases[lease.lease_id] = timed

    def absorb_report(self, report: pb.LeaseReport, now: float) -> bool:
        """Merge an agent's report; return whether its lease is known here."""
        self.outranked_by = max(self.outranked_by, report.epoch)
        self.heard.ring()
        entry = self.leases.get(ids.LeaseId(report.lease_id))
        if entry is None:
            return False
        before = (entry.leaving, entry.seen is None, len(entry.strangers))
        if entry.seen is None:
            self.lease_pause = backoff.Failures()  # leases do come up
            if entry.asked is not None:
                entry.came_s = now - entry.asked
        entry.seen = now
        entry.reported_us = report.at_us
        # A revision counts only if it is of this leader: the ones before began elsewhere.
        entry.acked = report.revision if report.epoch == self.epoch else -1
        entry.leaving = report.closing
        self.weights.absorb(report)
        self._prove_running(entry, report, now)
        entry.strangers = self._strangers(entry, report)
        changed = self._merge_slots(entry, report, now)
        changed |= self._merge_replicas(entry, report, now)
        if changed or before != (entry.leaving, False, len(entry.strangers)):
            self.touch()
        if before[2] != len(entry.strangers):
            self.wishes.ring()
        return True

    def absorb_demand(self, gateway_id: str, demand: dict[str, fleet.Demand], now: float) -> None:
        """Take what a gateway has waiting."""
        self.demand[gateway_id] = (now, demand)
        for model, part in demand.items():
            self.rates.note(gateway_id, model, part.arrived, now)
        self.heard.ring()

    def forget_gateway(self, gateway_id: str) -> None:
        """A gateway has left."""
        self.demand.pop(gateway_id, None)
        self.rates.forget(gateway_id)
        self.heard.ring()

    def change_lease(self, lease: fleet.Lease, now: float) -> None:
        """Put a lease's newer record in place."""
        entry = self.leases[lease.lease_id]
        if entry.lease.state is not lease.state:
            entry.since = now
            entry.absent_polls = 0
        entry.lease = lease
        if lease.state is fleet.LeaseState.ENDED:
            del self.leases[lease.lease_id]
            self.ended.add(lease.lease_id)
        self.wished()

    def finish(self, replica_id: ids.ReplicaId, event: replicas.ReplicaEvent, reason: str) -> None:
        """Let a replica end by ``event``."""
        entry = self.replicas[replica_id]
        state = replicas.replica_after(entry.replica.state, event)
        self._remove(dataclasses.replace(entry.replica, state=state, reason=reason))
        self.touch()

    def fail(self, key: tuple[str, str], now: float, reason: str) -> None:
        """Count a failed start."""
        before = self.failures.get(key, backoff.Failures())
        self.failures[key] = backoff.failed(
            before, now, reason, first_s=self.pauses.first_s, most_s=self.pauses.most_s
        )

    def desired(self, lease_id: ids.LeaseId) -> pb.LeaseDesired | None:
        """Return what should be in a lease; None while that is not known yet."""
        entry = self.leases.get(lease_id)
        if lease_id in self.ended:
            # Slurm has ended its job and not its agent: nobody else will, where no epilog does.
            return pb.LeaseDesired(epoch=self.epoch, revision=LAST, lease_id=lease_id, close=True)
        if entry is None or entry.strangers:
            return None
        desired = entries.desired(self.epoch, entry, self.replicas.values())
        self.weights.fill(desired, entry.lease, self.deployments, self.routes)
        return desired

    def _prove_running(self, entry: entries.LeaseEntry, report: pb.LeaseReport, now: float) -> None:
        """An agent's word proves that its lease has begun, before Slurm is polled again.

        It does not make an UNKNOWN lease known: that is for Slurm to say.
        """
        lease = entry.lease
        if lease.state not in {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING}:
            return
        entry.since = now
        entry.absent_polls = 0
        entry.lease = dataclasses.replace(
            lease,
            state=replicas.lease_after(lease.state, replicas.LeaseEvent.RAN),
            slurm_job_id=lease.slurm_job_id or report.slurm_job_id,
            nodes=lease.nodes or ((report.node,) if report.node else ()),
            started_us=lease.started_us or report.started_us,
            reason="its agent has come",
        )
        self.news_leases[lease.lease_id] = entry.lease

    def _strangers(
        self, entry: entries.LeaseEntry, report: pb.LeaseReport
    ) -> tuple[snapshot.Stranger, ...]:
        found: list[snapshot.Stranger] = []
        for slot in report.slots:
            for item in slot.replicas:
                replica_id = ids.ReplicaId(item.replica_id)
                if replica_id in self.replicas or replica_id in self.gone:
                    continue
                state = fleet.ReplicaState(item.state)
                if replicas.replica_final(state):
                    continue
                found.append(
                    snapshot.Stranger(
                        snapshot.Slot(
                            ids.SlotId(slot.slot_id),
                            entry.lease.lease_id,
                            slot.gpus,
                            state=replicas.SlotState(slot.state),
                        ),
                        reported.replica(entry.lease, slot, item),
                    )
                )
        return tuple(found)

    def _merge_slots(self, entry: entries.LeaseEntry, report: pb.LeaseReport, now: float) -> bool:
        reported = {ids.SlotId(slot.slot_id): slot for slot in report.slots}
        changed = False
        for slot_id, slot in entry.slots.items():
            word = reported.get(slot_id)
            state = slot.state if word is None else replicas.SlotState(word.state)
            if word is None and entry.acked >= entry.revision:
                # Its agent has read that it should be there, or be closed, and does not have it.
                if slot.close:
                    state = replicas.SlotState.CLOSED
                elif slot.state is not replicas.SlotState.STARTING:
                    state = replicas.SlotState.LOST
            if state is slot.state or slot.state.final:
                continue
            if state is replicas.SlotState.READY:
                startup.allocated(self.replicas.values(), slot_id, now)
            reason = "its agent does not have it" if word is None else word.reason
            entry.slots[slot_id] = dataclasses.replace(slot, state=state, reason=reason)
            self.news_slots[slot_id] = entry.slots[slot_id]
            changed = True
        return changed

    def _merge_replicas(
        self, entry: entries.LeaseEntry, report: pb.LeaseReport, now: float
    ) -> bool:
        changed = False
        named: set[ids.ReplicaId] = set()
        ready: set[ids.SlotId] = set()
        for slot in report.slots:
            if slot.state == replicas.SlotState.READY:
                ready.add(ids.SlotId(slot.slot_id))
            for item in slot.replicas:
                replica_id = ids.ReplicaId(item.replica_id)
                named.add(replica_id)
                known = self.replicas.get(replica_id)
                if known is not None and known.replica.lease_id == entry.lease.lease_id:
                    changed |= self._merge_replica(known, entry.lease, slot, item, now)
        for replica_id, known in self.replicas.items():
            if known.replica.lease_id != entry.lease.lease_id:
                continue
            told = entry.acked >= known.revision and known.replica.slot_id in ready
            if replica_id in named or not told:
                known.missing_since = None
            elif known.missing_since is None:
                known.missing_since = now
        return changed

    def _merge_replica(
        self,
        known: entries.ReplicaEntry,
        lease: fleet.Lease,
        slot: pb.SlotReport,
        item: pb.ReplicaReport,
        now: float,
    ) -> bool:
        """Take one replica's report; return whether anything about it is new."""
        before = known.replica
        after = reported.replica(lease, slot, item, spec=before.spec)
        if after.state is not before.state:
            event = replicas.reported(after.state)
            try:
                if event is None:
                    raise replicas.UnlistedEvent(f"it is {before.state} and reported as starting")
                after = dataclasses.replace(
                    after, state=replicas.replica_after(before.state, event)
                )
            except replicas.UnlistedEvent as error:
                log.warning("replica %s: report ignored: %s", before.replica_id, error)
                return False
            self._judge(known, after, now)
        if after.stats is not None and (
            before.stats is None or after.stats.at_us != before.stats.at_us
        ):
            known.stats_at = now
        if replicas.replica_final(after.state):
            self._remove(after)
            return True
        after = known.replica = startup.shown(known, after)
        if after.state is not before.state:
            self.news_replicas[after.replica_id] = after
        return after != before

    def _judge(self, known: entries.ReplicaEntry, after: fleet.Replica, now: float) -> None:
        """Count failed starts, and forget them once a replica serves."""
        key = (after.spec.model, after.spec.version)
        if after.state is fleet.ReplicaState.SERVING:
            self.failures.pop(key, None)
            if not known.served:
                known.served = True
                phases = startup.served(known, after.phases_s, now)
                self.starts.note(key, phases, woken=after.incarnation > 1)
        if not replicas.replica_final(after.state) or not known.run:
            return
        if self.leases[known.replica.lease_id].leaving:
            return  # the lease ends, and what was in it with it: no fault of the model
        started = known.replica.state not in {
            fleet.ReplicaState.STARTING,
            fleet.ReplicaState.WARM,
        }
        reason = after.reason or f"replica {after.replica_id} ended as {after.state}"
        if started:
            # It did come up: try again after the first pause, without a step towards quarantine.
            self.failures[key] = backoff.Failures(0, now + self.pauses.first_s, reason)
        else:
            self.fail(key, now, reason)

    def _remove(self, replica: fleet.Replica) -> None:
        entry = self.replicas.pop(replica.replica_id)
        held = self.leases.get(entry.replica.lease_id)
        if held is not None:
            held.revision += 1
            self.wishes.ring()
        self.gone[replica.replica_id] = None
        if len(self.gone) > GONE_KEPT:
            del self.gone[next(iter(self.gone))]
        self.news_replicas[replica.replica_id] = replica
