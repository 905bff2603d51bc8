"""What agents report, merged into what the leader knows: leases, slots and replicas.

Owned by the event loop, as `live.Live` is, which is one of these. It decides nothing.
"""

import dataclasses
import logging

from scheduler.contracts import fleet, ids
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import backoff, replicas, snapshot
from scheduler.runtime import adapter_pools, entries, node_weights, reported, scaling, startup

log = logging.getLogger(__name__)
GONE_KEPT = 10_000  # replicas that have ended and that a late report may still name


class Absorbing:
    """Leases and replicas, and what changes when their agents speak.

    Attributes:
        bell: rings with every change that a gateway should hear of.
        heard: rings with every report, news or not, and when an agent or a gateway leaves.
        wishes: rings when the desired state of a lease may have changed.
    """

    def __init__(self, epoch: int, pauses: entries.Pauses) -> None:
        self.epoch = epoch
        self.outranked_by = epoch  # the newest epoch that an agent follows
        self.pauses = pauses
        self.bell = entries.Bell()
        self.wishes = entries.Bell()
        self.heard = entries.Bell()
        # Revisions of one epoch start above every revision of the epochs before.
        self.revision = epoch << 32
        self.leases: dict[ids.LeaseId, entries.LeaseEntry] = {}
        self.replicas: dict[ids.ReplicaId, entries.ReplicaEntry] = {}
        self.gone: dict[ids.ReplicaId, None] = {}
        self.failures: dict[tuple[str, str], backoff.Failures] = {}
        self.lease_pause = backoff.Failures()
        self.weights = node_weights.NodeWeights()
        self.adapters = adapter_pools.Pools()
        self.starts = scaling.Starts()
        self.news_replicas: dict[ids.ReplicaId, fleet.Replica] = {}
        self.news_slots: dict[ids.SlotId, snapshot.Slot] = {}
        self.news_leases: dict[ids.LeaseId, fleet.Lease] = {}

    def touch(self) -> None:
        """Note a change and wake who waits for one."""
        self.revision += 1
        self.bell.ring()

    def wished(self) -> None:
        """Note a change that agents must hear of too."""
        self.touch()
        self.wishes.ring()

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
        self._say_unread(entry, report)
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

    def _say_unread(self, entry: entries.LeaseEntry, report: pb.LeaseReport) -> None:
        """Say once what an agent of a newer release tells in words that are not known here."""
        unread = frozenset(reported.unread(report))
        for what in sorted(unread - entry.unread):
            log.warning(
                "lease %s: %s: a newer release's word, it takes no requests meanwhile: upgrade this broker",
                entry.lease.lease_id,
                what,
            )
        entry.unread = unread

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
            try:
                replicas.replica_after(before.state, replicas.reported(after.state))
            except replicas.UnlistedEvent as error:
                log.warning("replica %s: report ignored: %s", before.replica_id, error)
                return False
            self._judge(known, after, now)
            known.turned(after.state, now)
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
        if _adapters(after) != _adapters(before) or after.state is not before.state:
            self.adapters.touch(after.spec.model)
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
        held = self.leases[known.replica.lease_id]
        slot = held.slots.get(known.replica.slot_id)
        if held.leaving or (slot is not None and slot.close):
            return  # the lease ends, or its slot, and what was in it with it: no fault of the model
        started = known.away is not None or known.replica.state not in {
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


def _adapters(replica: fleet.Replica) -> object:
    """Return what of a replica's adapters decides, without the counts of their use."""
    return [(one.name, one.state) for one in replica.adapters or ()]
