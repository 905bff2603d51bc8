"""What the leading broker knows now: the registry's memory merged with what agents and Slurm say.

Owned by the event loop: only the applier changes wishes, only reports and polls change facts. It
decides nothing; a snapshot of it goes to the planner.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping

from scheduler.contracts import fleet, ids, observed, ports, slurm
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import (
    autoscale,
    copies,
    floors,
    ladder,
    leases,
    rollouts,
    snapshot,
)
from scheduler.runtime import (
    absorbing,
    adapter_pools,
    arrivals,
    entries,
    forecasts,
    hosts,
    schedules,
)
from scheduler.runtime.registry import cordons, holdings, wishes

TRIALS_KEPT = 20_000  # how requests fared, between two looks at the rollouts
LAST = (1 << 63) - 1  # a revision that none comes after
_STARTED = {fleet.ReplicaState.SERVING, fleet.ReplicaState.DRAINING, fleet.ReplicaState.ASLEEP}
ENDED_KEPT = 2_000  # leases that have ended, beside those whose jobs Slurm still names


class Live(absorbing.Absorbing):
    """The leader's picture.

    Attributes:
        settled: false while a new leader waits for agents to come back.
        reports_refused: reports of gateways that could not be taken.
    """

    def __init__(self, epoch: int, cluster: str, pauses: entries.Pauses, now: float) -> None:
        super().__init__(epoch, pauses)
        self.cluster = cluster
        self.started = now
        self.settled = False
        self.reports_refused = 0
        self.ended: dict[ids.LeaseId, None] = {}  # in the order of their ends
        self.cancels: dict[ids.SlurmJobId, float] = {}
        self.deployments: tuple[snapshot.Deployment, ...] = ()
        self.routes: Mapping[str, fleet.Route] = {}
        self.rollouts: tuple[rollouts.Rollout, ...] = ()
        self.trials: collections.deque[observed.Trial] = collections.deque(maxlen=TRIALS_KEPT)
        self.shadows = copies.Shadows()
        self.demand: dict[str, tuple[float, dict[str, observed.Demand]]] = {}
        self.gateways = hosts.Hosts()
        self.ladder_memory: Mapping[str, ladder.Memory] = {}
        self.scale_memory: Mapping[tuple[str, str], autoscale.Memory] = {}
        self.lent_at: float | None = None
        self.batch_work: Mapping[str, ports.BatchWork] = {}
        self.cordons: Mapping[str, cordons.Cordon] = {}
        self.timetable: tuple[schedules.Schedule, ...] = ()
        self.scheduled: tuple[floors.Floor, ...] = ()
        self.odd_schedules: set[str] = set()  # why some say nothing here
        self.learned = forecasts.Learned()
        self.standing = wishes.Standing()
        self.rates = arrivals.Rates[str]()
        self.standard_rates = arrivals.Rates[str]()
        self.version_rates = arrivals.Rates[tuple[str, str]]()
        self.jobs: tuple[slurm.Job, ...] | None = None
        self.nodes: tuple[slurm.Node, ...] = ()
        self.reservations: tuple[slurm.Reservation, ...] = ()
        self.hung_up: set[ids.LeaseId] = set()  # agents that left since the last tick
        self.polls = 0
        self.polled = float("-inf")

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
                phases_s=row.replica.phases_s if row.replica.state in _STARTED else {},
            )
        self.ended |= dict.fromkeys(held.ended)

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
        self._forget(stamped.keys(), began)

    def _forget(self, named: Collection[ids.LeaseId], now: float) -> None:
        """Drop what no decision asks for any more; who leads for months must not grow."""
        self.cancels = {
            job_id: at for job_id, at in self.cancels.items() if now - at < leases.CANCEL_AGAIN_S
        }
        spare = len(self.ended) - ENDED_KEPT
        if spare > 0:
            old = [lease_id for lease_id in self.ended if lease_id not in named]
            for lease_id in old[:spare]:
                del self.ended[lease_id]
        used = {known.replica.slot_id for known in self.replicas.values()}
        for entry in self.leases.values():
            entry.forget_slots(used)

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

    def absorb_demand(
        self, gateway_id: str, demand: dict[str, observed.Demand], now: float
    ) -> None:
        """Take what a gateway has waiting."""
        self.demand[gateway_id] = (now, demand)
        for model, part in demand.items():
            self.rates.note(gateway_id, model, part.arrived, now)
            self.standard_rates.note(gateway_id, model, part.arrived_standard, now)
            for version, one in part.versions.items():
                self.version_rates.note(gateway_id, (model, version), one.arrived, now)
        self.adapters.note(gateway_id, demand)
        self.heard.ring()

    def forget_gateway(self, gateway_id: str) -> None:
        """A gateway has left."""
        self.demand.pop(gateway_id, None)
        self.rates.forget(gateway_id)
        self.standard_rates.forget(gateway_id)
        self.version_rates.forget(gateway_id)
        self.adapters.forget(gateway_id)
        self.heard.ring()

    def place_adapters(self, now: float, now_us: int, *, every: bool = True) -> None:
        """Tell replicas which adapters to hold, where that is another answer than before.

        Args:
            now: monotonic seconds.
            now_us: UTC µs.
            every: of all models, not of those alone that have changed.
        """
        scene = adapter_pools.Scene(
            self.deployments, self.routes, tuple(self.replicas.values()), now, now_us
        )
        leases, faults = self.adapters.place(scene, every=every)
        for lease_id in leases & self.leases.keys():
            self.leases[lease_id].revision += 1
        if leases:
            self.wished()
        elif faults:
            self.touch()

    def change_lease(self, lease: fleet.Lease, now: float) -> None:
        """Put a lease's newer record in place."""
        entry = self.leases[lease.lease_id]
        if entry.lease.state is not lease.state:
            entry.since = now
            entry.absent_polls = 0
            if lease.state is fleet.LeaseState.PENDING:
                # Requeued: its next run has an agent of its own.
                entry.seen, entry.acked, entry.leaving = None, -1, ""
        entry.lease = lease
        if lease.state is fleet.LeaseState.ENDED:
            del self.leases[lease.lease_id]
            self.ended[lease.lease_id] = None
        self.wished()

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
