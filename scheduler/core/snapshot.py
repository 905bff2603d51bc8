"""What a plan is made from: one frozen picture of Slurm, leases, replicas, wishes and demand.

Times: ``*_us`` are UTC microseconds, ``*_s`` are ages or durations in seconds, `now` is monotonic
seconds. Nothing here decides.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping

from scheduler.contracts import fleet, ids, observed, slurm
from scheduler.core import (
    autoscale,
    backoff,
    floors,
    forecast,
    grounds,
    ladder,
    lending,
    replicas,
    windows,
)


class Traffic(enum.StrEnum):
    """How requests come to a version (`core.traffic`)."""

    PERCENT = "percent"  # of the route
    POOL = "pool"  # by the length of their prompts
    SHADOW = "shadow"  # copies of those of others


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """How much of a model's version is kept warm.

    Attributes:
        replicas: wanted.
        role: what a replica takes in calm.
        hold_batch: an admin keeps batch off this model: every replica is interactive.
        quarantined_until_us: nothing is started before then; `quarantine_reason` says why.
        scaling: how the number follows demand; None: it is `replicas`, whatever the demand.
        traffic: how requests come to it; `share`: the part of them that does, where `scaling` does not say.
        pinned: `replicas` is an admin's own number: no schedule raises it.
        batch_share: the part of its model's batch lines that comes to it while a rollout keeps it ready for
            all requests; None: the same as of requests.
    """

    spec: fleet.ReplicaSpec
    replicas: int
    role: fleet.Role = fleet.Role.SHARED
    hold_batch: bool = False
    quarantined_until_us: int = 0
    quarantine_reason: str = ""
    scaling: autoscale.Scaling | None = None
    traffic: Traffic = Traffic.PERCENT
    share: float = 1.0
    pinned: bool = False
    batch_share: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Return model and version."""
        return (self.spec.model, self.spec.version)


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One job step of a lease; `close` is our wish, `state` and `reason` what was reported last."""

    slot_id: ids.SlotId
    lease_id: ids.LeaseId
    gpus: int
    cpus: int = 1
    close: bool = False
    state: replicas.SlotState = replicas.SlotState.STARTING
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease and what is known of its agent.

    Attributes:
        lease: the registry's word.
        slots: slots that are not final.
        silent_s: seconds since its agent's last word; None if it never came.
        held_s: seconds since the lease is in its state, as this broker saw it.
        idle_s: seconds since it last had a replica that is not final.
        absent_polls: polls of Slurm in a row, begun after the lease was asked for, without its job.
        leaving: why its agent is leaving, or "".
        fresh: whether Slurm's newest answer is younger than the lease's state.
        left_s: seconds until its walltime ends, infinity while that is not known.
        park_gb: host memory left for parked models, in 10^9 bytes.
        drain_asked: an admin wants what is in it to move away: who and why, or "".
    """

    lease: fleet.Lease
    slots: tuple[Slot, ...] = ()
    silent_s: float | None = None
    held_s: float = 0.0
    idle_s: float = 0.0
    absent_polls: int = 0
    leaving: str = ""
    fresh: bool = True
    left_s: float = math.inf
    park_gb: float = 0.0
    drain_asked: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownReplica:
    """A replica that is not final, and what we want of it.

    Attributes:
        replica: what is; its role is what the replica says it takes now.
        run: whether it should run (false: drain, then stop).
        wanted_role: the role that it was last told.
        age_s: seconds since it was ordered.
        stats_age_s: seconds since its stats came; None if none did.
        drain_asked: an admin wants it gone.
        missing_s: seconds for which its agent, who knows that it should be there, has not named it.
        budget_s: seconds in which the rung that ordered it should have it serving; 0: not known, or done.
        asleep: whether it was told to be parked; None: as its state says.
        preempt_asked: an admin wants its GPUs now: who and why, or "".
        told_s: seconds since it was told `wanted_role`.
        away_s: seconds for which it has been off the routes by itself, though it had served; None: it is not.
    """

    replica: fleet.Replica
    run: bool
    wanted_role: fleet.Role
    age_s: float = 0.0
    stats_age_s: float | None = None
    drain_asked: bool = False
    missing_s: float = 0.0
    asleep: bool | None = None
    budget_s: float = 0.0
    preempt_asked: str = ""
    told_s: float = 0.0
    away_s: float | None = None

    @property
    def coming_s(self) -> float:
        """Seconds for which it should be coming up, after an order or after it left the routes by itself."""
        return self.age_s if self.away_s is None else self.away_s

    @property
    def awake(self) -> bool:
        """Whether it is wanted awake, though it may be parked still."""
        parked = self.replica.state is fleet.ReplicaState.ASLEEP
        return not (parked if self.asleep is None else self.asleep)

    @property
    def parked(self) -> bool:
        """Whether it is parked, and nobody has woken it yet."""
        return self.run and not self.awake and self.replica.state is fleet.ReplicaState.ASLEEP

    @property
    def key(self) -> tuple[str, str]:
        """Return model and version."""
        return (self.replica.spec.model, self.replica.spec.version)


@dataclasses.dataclass(frozen=True, slots=True)
class Stranger:
    """A replica that an agent reports and nobody here ordered: the registry was lost, or is older."""

    slot: Slot
    replica: fleet.Replica


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """One picture; see the fields' own types.

    Attributes:
        jobs: every job that Slurm knows, None if Slurm did not answer the last poll.
        poll: number of the poll that `jobs` is from.
        nodes: Slurm's nodes by its newest answer; empty if nothing is known of them.
        settling: the leader is new: agents may still come back, so nothing is started or asked for.
        ended: leases of the registry that ended, to tell their jobs from unknown ones.
        cancels: Slurm job to seconds since we last cancelled it.
        demand: model to what gateways have waiting; a model without gateways is absent.
        failures: (model, version) to its failed starts.
        lease_pause: failed asks of Slurm.
        ladder_memory: model to the ladder's memory.
        gpus: most GPUs that may be held at once; 0: no bound is known.
        rates: model to requests/s over the last minute; absent where nobody counts them.
        standard_rates: the part of it that is of tier standard.
        version_rates: the same by model and version, of models with pools.
        curves: model to what two weeks of history say of its demand.
        held_s: model to the seconds that a request of it stays, by the same history.
        week_s: seconds since Monday 00:00 of local time; None: the clock is not trusted.
        scheduled: what schedules keep warm now and next.
        closures: maintenance and Slurm's reservations.
        backlogs: model to its batch work.
        scale_memory: deployment to the autoscaler's memory.
        lent_at: when shares of batch last moved, monotonic seconds.
        cordoned: nodes that are kept off now.
        starts: deployment to the seconds that its replicas lately took from order to serving.
        where: leases may start at all.
    """

    now: float
    now_us: int
    cluster: str
    jobs: tuple[slurm.Job, ...] | None = None
    poll: int = 0
    nodes: tuple[slurm.Node, ...] = ()
    settling: bool = False
    leases: tuple[HeldLease, ...] = ()
    ended: frozenset[ids.LeaseId] = frozenset()
    cancels: Mapping[ids.SlurmJobId, float] = dataclasses.field(default_factory=dict)
    replicas: tuple[KnownReplica, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    demand: Mapping[str, observed.Demand] = dataclasses.field(default_factory=dict)
    failures: Mapping[tuple[str, str], backoff.Failures] = dataclasses.field(default_factory=dict)
    lease_pause: backoff.Failures = dataclasses.field(default_factory=backoff.Failures)
    ladder_memory: Mapping[str, ladder.Memory] = dataclasses.field(default_factory=dict)
    gpus: int = 0
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    standard_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    version_rates: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, forecast.Curve] = dataclasses.field(default_factory=dict)
    held_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    week_s: float | None = None
    scheduled: tuple[floors.Floor, ...] = ()
    closures: tuple[windows.Window, ...] = ()
    backlogs: Mapping[str, lending.Backlog] = dataclasses.field(default_factory=dict)
    scale_memory: Mapping[tuple[str, str], autoscale.Memory] = dataclasses.field(
        default_factory=dict
    )
    lent_at: float | None = None
    cordoned: frozenset[str] = frozenset()
    starts: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    where: grounds.Grounds = grounds.Grounds()  # noqa: RUF009 - frozen
