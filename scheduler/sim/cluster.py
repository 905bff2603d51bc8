"""Slurm in virtual time: nodes, leases as jobs, other users' jobs, preemption, failures.

Placement is Slurm's: first in, first out by priority with the tightest node first, in passes some seconds
apart. Other users' jobs live on their own nodes; our leases may use those when they are free, and ours
are never theirs. Preemption kills the youngest backfill leases: at once without a grace time (seen on a real
cluster: 0.9 to 4.0 s until the winner starts), else in a controller pass (16 to 22 s).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from scheduler.sim import scenario

OTHER_MEAN_S = 7200.0
OTHER_SIZES = (1, 1, 2, 4, 8)
NO_GRACE_S = (0.9, 4.0)
WITH_GRACE_S = (16.0, 22.0)


@dataclasses.dataclass(slots=True)
class Node:
    """A node; `ours`: only leases run there."""

    name: str
    gpus: int
    free: int
    ours: bool
    up: bool = True


@dataclasses.dataclass(slots=True)
class Job:
    """A job; `kind` is serve, backfill or other. `ends_s`: when its walltime or its work is over.

    It never starts on a node of `exclude`.
    """

    job_id: str
    kind: str
    gpus: int
    lasts_s: float
    submitted: float
    lease_id: str = ""
    node: Node | None = None
    started: float = -1.0
    ends_s: float = math.inf
    state: str = "PENDING"
    preempting: bool = False
    exclude: tuple[str, ...] = ()


class Cluster:
    """The cluster. Times are the simulation's seconds; `started` and `ended` are told of every lease."""

    def __init__(
        self,
        fleet: scenario.Fleet,
        draw: np.random.Generator,
        *,
        preempts: bool,
        started: Callable[[Job, float], None],
        ended: Callable[[Job, float, str], None],
        at: Callable[[float, Callable[[float], None]], None],
    ) -> None:
        self._fleet = fleet
        self._draw = draw
        self._preempts = preempts
        self._started = started
        self._ended = ended
        self._at = at
        per = fleet.gpus_per_node
        self.nodes = [
            Node(f"n{number}", per, per, ours=number < math.ceil(fleet.gpus / per))
            for number in range(math.ceil(fleet.gpus / per) + fleet.other_gpus // per)
        ]
        self.pending: list[Job] = []
        self.running: dict[str, Job] = {}
        self._number = 0
        self.instant = False
        self.failures = 0

    def begin(self, now: float) -> None:
        """Start other users' jobs and failures."""
        per = self._fleet.gpus_per_node
        others = [node for node in self.nodes if not node.ours]
        self._at(now, self._pass)
        if others and self._fleet.other_load > 0:
            mean = sum(min(size, per) for size in OTHER_SIZES) / len(OTHER_SIZES)
            self._gap = OTHER_MEAN_S * mean / (len(others) * per * self._fleet.other_load)
            self._at(now + self._draw.exponential(self._gap), self._other)
        if self._fleet.mtbf_node_h > 0:
            self._break = self._fleet.mtbf_node_h * 3600 / len(self.nodes)
            self._at(now + self._draw.exponential(self._break), self._fail)

    def submit(self, job: Job, now: float) -> Job:
        """Queue a job and give it its id."""
        self._number += 1
        job.job_id = str(self._number)
        self.pending.append(job)
        if self.instant:
            self.schedule(now)
        return job

    def cancel(self, job: Job, now: float, state: str = "CANCELLED") -> None:
        """End a job."""
        if job in self.pending:
            self.pending.remove(job)
            job.state = state
        elif job.job_id in self.running:
            self._end(job, now, state)

    def schedule(self, now: float) -> None:
        """Run one pass of the scheduler."""
        order = {"serve": 0, "other": 1, "backfill": 2}
        for job in sorted(self.pending, key=lambda job: (order[job.kind], job.submitted)):
            fitting = [
                node
                for node in self.nodes
                if node.up
                and node.free >= job.gpus
                and (job.kind != "other" or not node.ours)
                and node.name not in job.exclude
            ]
            if fitting:
                self._start(job, min(fitting, key=lambda node: (not node.ours, node.free)), now)
            elif self._preempts and job.kind == "serve":
                self._preempt(job, now)

    def _start(self, job: Job, node: Node, now: float) -> None:
        self.pending.remove(job)
        node.free -= job.gpus
        job.node, job.started, job.state = node, now, "RUNNING"
        job.ends_s = now + job.lasts_s
        self.running[job.job_id] = job
        self._at(job.ends_s, lambda at: self._over(job, at))
        if job.kind != "other":
            self._started(job, now)

    def _over(self, job: Job, now: float) -> None:
        if job.job_id in self.running:
            self._end(job, now, "COMPLETED" if job.kind == "other" else "TIMEOUT")

    def _end(self, job: Job, now: float, state: str) -> None:
        del self.running[job.job_id]
        if job.node is not None:
            job.node.free += job.gpus
        job.state = state
        if job.kind != "other":
            self._ended(job, now, state)

    def _preempt(self, job: Job, now: float) -> None:
        """Kill the youngest backfill leases of the node where that frees enough."""
        best: list[Job] | None = None
        for node in self.nodes:
            victims = sorted(
                (
                    one
                    for one in self.running.values()
                    if one.kind == "backfill" and one.node is node
                ),
                key=lambda one: -one.started,
            )
            if any(one.preempting for one in victims):
                continue  # on its way for somebody already
            got, chosen = node.free, []
            for victim in victims:
                if got >= job.gpus:
                    break
                got += victim.gpus
                chosen.append(victim)
            usable = node.up and node.name not in job.exclude
            if usable and got >= job.gpus and (best is None or len(chosen) < len(best)):
                best = chosen
        span = WITH_GRACE_S if self._fleet.grace_s > 0 else NO_GRACE_S
        for victim in best or []:
            victim.preempting = True
            due = now + float(self._draw.uniform(*span))
            self._at(due, functools.partial(self.cancel, victim, state="PREEMPTED"))

    def _pass(self, now: float) -> None:
        self.schedule(now)
        self._at(now + self._fleet.schedule_s, self._pass)

    def _other(self, now: float) -> None:
        size = min(int(self._draw.choice(OTHER_SIZES)), self._fleet.gpus_per_node)
        if len(self.pending) < 200:  # other users give up on a queue that long
            self.submit(
                Job("", "other", size, float(self._draw.exponential(OTHER_MEAN_S)), now), now
            )
        self._at(now + self._draw.exponential(self._gap), self._other)

    def _fail(self, now: float) -> None:
        node = self.nodes[int(self._draw.integers(len(self.nodes)))]
        if node.up:
            self.failures += 1
            node.up = False
            for job in [one for one in self.running.values() if one.node is node]:
                self._end(job, now, "NODE_FAIL")
            self._at(now + self._fleet.repair_s, lambda at: setattr(node, "up", True))
        self._at(now + self._draw.exponential(self._break), self._fail)
