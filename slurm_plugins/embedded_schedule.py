"""Which pending job of the embedded Slurm starts where, and which running one gives way. Pure.

As with Slurm's preempt/partition_prio: jobs of an earlier partition go first, and may take the GPUs
of a later one; within a partition, the order of submission, and a job that does not fit is passed by.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from scheduler.contracts import slurm
from slurm_plugins import embedded_store


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The pretend machine: ``nodes`` nodes with ``gpus`` GPUs and ``cpus`` CPUs each.

    Attributes:
        partitions: their names, the one of highest priority first; every node is in each.
        gres_type: the GPUs' type, "" for none.
    """

    nodes: int = 4
    gpus: int = 4
    cpus: int = 64
    partitions: tuple[str, ...] = ("serve", "backfill", "user")
    gres_type: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"e{number}" for number in range(1, self.nodes + 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """What time it is, and the reservations: a job that would run into one does not start on its nodes."""

    now_us: int = 0
    reservations: Sequence[slurm.Reservation] = ()

    def to(self, job: embedded_store.Record) -> frozenset[str]:
        """Return the nodes on which ``job`` can't start now."""
        end_us = self.now_us + job.time_limit_s * 1_000_000
        return frozenset(
            node
            for kept in self.reservations
            if kept.starts_us < end_us and kept.ends_us > self.now_us
            for node in kept.nodes
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Start a job in a partition with these GPUs on each of its nodes."""

    job_id: str
    partition: str
    gpus: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What to do now: jobs to start, jobs to preempt, and why the others wait."""

    starts: tuple[Start, ...]
    preempt: tuple[str, ...]
    reasons: Mapping[str, str]


def fault(spec: slurm.JobSpec, shape: Shape) -> str:
    """Return why a job could never start here, in Slurm's words, or "" if it can."""
    unknown = [name for name in spec.partitions if name not in shape.partitions]
    if unknown:
        return f"invalid partition specified: {unknown[0]}"
    if spec.gpus_per_node and spec.gres != "gpu":
        return f"Invalid generic resource (gres) specification: this Slurm gives whole GPUs, not {spec.gres}"
    if spec.gpus_per_node and spec.gres_type and spec.gres_type != shape.gres_type:
        return "Invalid generic resource (gres) specification"
    eligible = [name for name in shape.names if _may(spec, name)]
    too_much = spec.gpus_per_node > shape.gpus or spec.cpus_per_node > shape.cpus
    if too_much or spec.nodes > len(eligible):
        return "Requested node configuration is not available"
    return ""


def decide(
    jobs: Sequence[embedded_store.Record], shape: Shape, closed: Closed | None = None
) -> Decision:
    """Place what fits now.

    Args:
        jobs: all that are not final.
        shape: the machine.
        closed: nodes that are reserved; None: none are.
    """
    running = [job for job in jobs if job.started_us]
    taken = _taken(running)
    starts: list[Start] = []
    preempt: list[str] = []
    reasons: dict[str, str] = {}
    blocked_tier: int | None = None
    pending = [job for job in jobs if not job.started_us]
    for job in sorted(
        pending, key=lambda job: (_tier(job.spec.partitions, shape), int(job.job_id))
    ):
        tier = _tier(job.spec.partitions, shape)
        shut = closed.to(job) if closed is not None else frozenset[str]()
        if job.spec.hold:
            reasons[job.job_id] = "JobHeldUser"
        elif blocked_tier is not None and tier > blocked_tier:
            reasons[job.job_id] = "Priority"
        elif placed := _place(job.spec, taken, shape, shut):
            starts.append(Start(job.job_id, shape.partitions[tier], placed))
            for node, indexes in placed.items():
                taken.append((node, job.spec.cpus_per_node, indexes))
        elif shut and _place(job.spec, taken, shape):
            # As with Slurm, what waits for a reservation's end keeps nobody else waiting.
            reasons[job.job_id] = "ReqNodeNotAvail, Reserved for maintenance"
        else:
            reasons[job.job_id] = "Resources"
            blocked_tier = tier if blocked_tier is None else blocked_tier
            if not preempt:
                preempt = _victims(job.spec, running, shape, shut)
    return Decision(tuple(starts), tuple(preempt), reasons)


def free(running: Sequence[embedded_store.Record], shape: Shape, node: str) -> tuple[int, int]:
    """Return the free GPUs and CPUs of a node."""
    gpus, cpus = _free(node, _taken(running), shape)
    return len(gpus), cpus


_Taken = list[tuple[str, int, tuple[int, ...]]]


def _taken(running: Sequence[embedded_store.Record]) -> _Taken:
    return [
        (node, job.spec.cpus_per_node, tuple(indexes))
        for job in running
        for node, indexes in job.gpus.items()
    ]


def _may(spec: slurm.JobSpec, node: str) -> bool:
    return node not in spec.exclude and (not spec.nodelist or node in spec.nodelist)


def _tier(partitions: Sequence[str], shape: Shape) -> int:
    return min(shape.partitions.index(name) for name in partitions)


def _free(node: str, taken: _Taken, shape: Shape) -> tuple[list[int], int]:
    held = {index for name, _, indexes in taken if name == node for index in indexes}
    cpus = shape.cpus - sum(cpus for name, cpus, _ in taken if name == node)
    return [index for index in range(shape.gpus) if index not in held], cpus


def _place(
    spec: slurm.JobSpec, taken: _Taken, shape: Shape, shut: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Choose nodes, the fullest that still fits first: whole nodes stay whole for wide jobs."""
    fits: list[tuple[int, str, list[int]]] = []
    for node in shape.names:
        if node in shut:
            continue
        gpus, cpus = _free(node, taken, shape)
        if _may(spec, node) and len(gpus) >= spec.gpus_per_node and cpus >= spec.cpus_per_node:
            fits.append((len(gpus), node, gpus))
    if len(fits) < spec.nodes:
        return {}
    chosen = sorted(fits, key=lambda fit: fit[0])[: spec.nodes]
    return {node: tuple(gpus[: spec.gpus_per_node]) for _, node, gpus in chosen}


def _victims(
    spec: slurm.JobSpec,
    running: Sequence[embedded_store.Record],
    shape: Shape,
    shut: Collection[str],
) -> list[str]:
    """Choose running jobs of lower partitions to end, the youngest first; none if that is not enough.

    What is ending already counts as free soon, so that one shortage does not end two jobs.
    """
    tier = _tier(spec.partitions, shape)
    staying = [job for job in running if not job.why]
    lower = [job for job in staying if _tier((job.partition,), shape) > tier]
    victims: list[str] = []
    for victim in [
        None,
        *sorted(lower, key=lambda job: (job.started_us, int(job.job_id)), reverse=True),
    ]:
        if victim is not None:
            staying.remove(victim)
            victims.append(victim.job_id)
        if _place(spec, _taken(staying), shape, shut):
            return victims
    return []
