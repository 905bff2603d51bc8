"""The fleet in virtual time: what the broker, the agents and the replicas are to the planner.

It gives the planner the same snapshot that the broker gives it and carries out the same actions, so the code
that decides is the one that decides in production. Nothing in here decides anything about capacity.
"""

import collections
import dataclasses
import math

import numpy as np

from scheduler.contracts import fleet, ids, observed, slurm
from scheduler.core import actions, autoscale, forecast, lending, plan, replicas, snapshot
from scheduler.sim import cluster, lives, policies, scenario, state, tally

CLUSTER = state.CLUSTER
AGENT_S = 2.0  # from the job's start to its agent's first word
S = fleet.ReplicaState


class World(lives.Lives):
    """The broker's hands and eyes; see the module."""

    def __init__(
        self,
        site: scenario.Scenario,
        policy: policies.Policy,
        settings: policies.Planner,
        start_s: float,
        books: tally.Tally,
    ) -> None:
        super().__init__(site, policy, settings, start_s, books)
        self.cordoned: dict[str, float] = {}  # node to the second until which it is kept off
        self.cluster = cluster.Cluster(
            site.fleet,
            self.draw,
            preempts=policy.slurm_preempts,
            started=self._job_started,
            ended=self._job_ended,
            at=self.at,
        )

    def picture(self) -> snapshot.Snapshot:
        """Return the snapshot."""
        now = self.now
        holding = {
            one.known.replica.lease_id
            for one in self.replicas.values()
            if one.state is not S.ASLEEP
        }
        parked: dict[str, float] = collections.defaultdict(float)
        for one in self.replicas.values():
            if one.state is S.ASLEEP or one.parks:
                shape = self.site.models[one.model].shape
                parked[one.known.replica.lease_id] += shape.weights_gb
        jobs: list[slurm.Job] = []
        held: list[snapshot.HeldLease] = []
        for lease_id, mine in self.leases.items():
            if lease_id in holding or mine.lease.state is not fleet.LeaseState.RUNNING:
                mine.idle_since = now
            jobs.append(_job(mine))
            share = mine.lease.gpus / self.site.fleet.gpus_per_node
            held.append(
                snapshot.HeldLease(
                    mine.lease,
                    tuple(mine.slots.values()),
                    silent_s=0.1 if now >= mine.agent_at else None,
                    held_s=now - mine.since,
                    idle_s=now - mine.idle_since,
                    left_s=mine.job.ends_s - now,
                    park_gb=max(0.0, self.site.fleet.host_gb * share - parked[lease_id]),
                )
            )
        return snapshot.Snapshot(
            now=now,
            now_us=round(now * 1e6),
            cluster=CLUSTER,
            jobs=tuple(jobs),
            leases=tuple(held),
            ended=frozenset(),
            replicas=tuple(self._known(one) for one in self.replicas.values()),
            deployments=tuple(self._deployment(n) for n in range(len(self.site.models))),
            demand={
                model.name: observed.Demand(
                    model.name,
                    {"interactive": len(self.waiting[n])},
                    {"interactive": self.flying[n]},
                    now - self.waiting[n][0].arrival if self.waiting[n] else 0.0,
                    tuple(self.newest[n]),
                )
                for n, model in enumerate(self.site.models)
            },
            failures={},
            ladder_memory=self.memory.ladder_memory,
            scale_memory=self.memory.scale_memory,
            lent_at=self.memory.lent_at,
            gpus=self.site.fleet.gpus,
            rates={model.name: self.rates[n] for n, model in enumerate(self.site.models)},
            curves=self.curves,
            week_s=now % forecast.WEEK_S,
            cordoned=frozenset(name for name, until in self.cordoned.items() if until > now),
            backlogs={
                model.name: self.batch_backlog(n)
                for n, model in enumerate(self.site.models)
                if self.backlog[n]
            },
        )

    def _known(self, one: state.Running) -> snapshot.KnownReplica:
        old = one.known.replica
        stats = None
        if one.state is S.SERVING:
            held = one.engine
            used = held.reserved + held.batch * (held.shape.prompt + held.shape.output)
            stats = fleet.ReplicaStats(
                round(self.now * 1e6),
                held.seats,
                held.running,
                int(held.batch),
                kv_blocks=held.kv_tokens,
                kv_free=max(0, held.kv_tokens - int(used)),
                step_ms=held.step_ms if held.backlog == 0 else 0.0,
            )
        replica = fleet.Replica(
            old.replica_id, CLUSTER, old.lease_id, old.slot_id, old.slurm_job_id, old.node,
            old.spec, one.state, one.role, stats=stats,
        )  # fmt: skip
        return snapshot.KnownReplica(
            replica,
            one.run,
            one.role,
            self.now - one.ordered,
            0.1 if stats else None,
            budget_s=one.budget_s if one.state is S.STARTING else 0.0,
        )

    def _deployment(self, n: int) -> snapshot.Deployment:
        model, room = self.site.models[n], self.capacity[n]
        shape = model.shape
        starts = self.starts[n][-20:]
        start_s = float(np.percentile(starts, 90)) if starts else self.site.fleet.start_s[1]
        role = fleet.Role.SHARED if model.share else fleet.Role.BATCH
        if n in self.fixed:
            need, lent = self.fixed[n]
            scaling = autoscale.Scaling(
                floor=need, maximum=need or 1, batch_floor=lent, batch_maximum=lent or 1
            )
        else:
            scaling = autoscale.Scaling(
                floor=model.floor,
                minimum=model.minimum,
                maximum=model.maximum,
                concurrency=room.sequences,
                requests_per_s=room.requests_per_s if model.share else 0.0,
                start_s=start_s,
                wake_s=self._wake_s(n),
                park_gb=shape.weights_gb if 2 in self.settings.rungs else 0.0,
            )
        return snapshot.Deployment(self.specs[n], 0, role, scaling=scaling)

    def batch_backlog(self, n: int) -> lending.Backlog:
        """Return a model's batch work."""
        work = sum(tokens for _, tokens in self.backlog[n]) / self.batch_rate[n]
        return lending.Backlog(work, self.backlog[n][0][0] - self.now)

    def apply(self, made: plan.Plan) -> None:
        """Carry out a plan."""
        self.memory = made
        for action in made.actions:
            name = type(action).__name__
            if self.now >= self.books.begin_s:
                self.books.moves[name] = self.books.moves.get(name, 0) + 1
            self._apply(action)

    def _apply(self, action: actions.Action) -> None:
        if isinstance(action, actions.RequestLease):
            self._request(action)
        elif isinstance(action, actions.FollowLease):
            self._follow(action)
        elif isinstance(action, actions.CloseLease | actions.CancelJob):
            self._close(action.lease_id)
        elif isinstance(action, actions.CloseSlot):
            self._close_slot(action)
        elif isinstance(action, actions.CordonNode):
            self.cordoned[action.node] = action.until_us / 1e6
        else:
            self._apply_to_replica(action)

    def _apply_to_replica(self, action: actions.Action) -> None:
        match action:
            case actions.StartReplica():
                self._start(action)
            case actions.StopReplica() | actions.ParkReplica():
                one = self.replicas[action.replica_id]
                if one.state is not S.DRAINING:
                    self._drain(one, action.drain_s, isinstance(action, actions.ParkReplica))
            case actions.WakeReplica():
                self._wake(action)
            case actions.SetRole():
                self._role(self.replicas[action.replica_id], action.role)
            case actions.MarkLost():
                self._gone(self.replicas[action.replica_id])
            case _:
                raise AssertionError(f"the simulation has no {type(action).__name__}")

    def _close_slot(self, action: actions.CloseSlot) -> None:
        """Close an empty slot: what is parked in it goes with it."""
        held = self.leases.get(action.lease_id)
        if held is None:
            return
        held.slots.pop(action.slot_id, None)
        for one in list(self.replicas.values()):
            if one.known.replica.slot_id == action.slot_id:
                self._gone(one)

    def _request(self, action: actions.RequestLease) -> None:
        self.number += 1
        lease_id = ids.LeaseId(f"l-{self.number:012x}")
        lasts = action.walltime_s or self.site.fleet.lease_walltime_s
        if self.instant:
            # A site that has run for a while has leases of every age.
            lasts = round(lasts * float(self.draw.uniform(0.05, 1)))
        lease = fleet.Lease(
            lease_id,
            CLUSTER,
            action.kind,
            "forebay",
            fleet.LeaseState.PENDING,
            action.gpus,
            slurm_job_id=str(self.number),
            walltime_s=lasts,
        )
        job = cluster.Job(
            "", action.kind.value, action.gpus, lasts, self.now, lease_id, exclude=action.exclude
        )
        held = state.Held(lease, job, self.now)
        self.leases[lease_id] = held
        self.cluster.submit(job, self.now)
        held.lease = dataclasses.replace(held.lease, slurm_job_id=held.job.job_id)

    def _follow(self, action: actions.FollowLease) -> None:
        held = self.leases[action.lease_id]
        state = replicas.lease_after(held.lease.state, action.event)
        if state is fleet.LeaseState.ENDED:
            del self.leases[action.lease_id]
            self.ended.add(action.lease_id)
            return
        nodes = (held.job.node.name,) if held.job.node else ()
        held.lease = dataclasses.replace(held.lease, state=state, nodes=nodes)
        held.since = self.now

    def _close(self, lease_id: ids.LeaseId) -> None:
        held = self.leases.get(lease_id)
        if held is None:
            return
        held.lease = dataclasses.replace(held.lease, state=fleet.LeaseState.CLOSING)
        held.since = self.now
        for one in list(self.replicas.values()):
            if one.known.replica.lease_id == lease_id:
                self._gone(one)
        self.cluster.cancel(held.job, self.now)

    def _job_started(self, job: cluster.Job, now: float) -> None:
        held = self.leases.get(job.lease_id)
        if held is not None:
            held.job = job
            held.agent_at = now if self.instant else now + AGENT_S

    def _job_ended(self, job: cluster.Job, now: float, state: str) -> None:
        for one in list(self.replicas.values()):
            if one.known.replica.lease_id == job.lease_id:
                self._gone(one)
        held = self.leases.get(job.lease_id)
        if held is not None:
            held.agent_at = math.inf
            held.slots.clear()


_STATES = {
    "PENDING": slurm.JobState.PENDING,
    "RUNNING": slurm.JobState.RUNNING,
    "CANCELLED": slurm.JobState.CANCELLED,
    "COMPLETED": slurm.JobState.COMPLETED,
    "TIMEOUT": slurm.JobState.TIMEOUT,
    "PREEMPTED": slurm.JobState.PREEMPTED,
    "NODE_FAIL": slurm.JobState.NODE_FAIL,
}


def _job(held: state.Held) -> slurm.Job:
    return slurm.Job(
        ids.SlurmJobId(held.job.job_id),
        CLUSTER,
        "forebay",
        "forebay",
        "forebay",
        "serve",
        _STATES[held.job.state],
        stamp=slurm.Stamp(CLUSTER, held.lease.lease_id, held.lease.kind.value, "forebay"),
        nodes=(held.job.node.name,) if held.job.node else (),
        gpus=held.lease.gpus,
    )
