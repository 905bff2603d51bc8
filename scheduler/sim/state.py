"""The state of a simulated site, and the heap of what is still to happen."""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from scheduler.contracts import fleet, ids
from scheduler.core import forecast, plan, sizing, snapshot
from scheduler.sim import cluster, engine, policies, scenario, tally

VERSION = "v1"
# Batch leaves streams so much more than promised. The throttle of a real replica holds the 95th percentile of
# its steps, prompts among them, within the promise (`engines.replica.throttle`); here the mean step is held.
SPEED_MARGIN = 1.7
CLUSTER = "sim"
S = fleet.ReplicaState


@dataclasses.dataclass(slots=True)
class Held:
    """A lease."""

    lease: fleet.Lease
    job: cluster.Job
    since: float
    slots: dict[str, snapshot.Slot] = dataclasses.field(default_factory=dict)
    agent_at: float = math.inf
    idle_since: float = 0.0
    number: int = 0


@dataclasses.dataclass(slots=True)
class Running:
    """A replica: `due` cancels what was to happen to it when it is told otherwise."""

    known: snapshot.KnownReplica
    model: int
    engine: engine.Engine
    ordered: float
    state: fleet.ReplicaState = S.STARTING
    role: fleet.Role = fleet.Role.SHARED
    run: bool = True
    parks: bool = False
    due: int = 0
    event: int = 0
    told_busy: float = 0.0
    told_wasted: float = 0.0
    told_batch: float = 0.0
    told_preempted: float = 0.0
    ready_s: float = 0.0
    budget_s: float = 0.0


class State:
    """Everything that is known; `events` is one heap of (time, order, what, version)."""

    def __init__(
        self,
        site: scenario.Scenario,
        policy: policies.Policy,
        settings: policies.Planner,
        start_s: float,
        books: tally.Tally,
    ) -> None:
        self.site, self.policy, self.settings, self.books = site, policy, settings, books
        self.now = start_s
        self.events: list[tuple[float, int, Any, int]] = []
        self.order = 0
        self.draw = np.random.default_rng(site.seed + 1000)
        self.leases: dict[str, Held] = {}
        self.ended: set[ids.LeaseId] = set()
        self.replicas: dict[str, Running] = {}
        self.open: list[list[Running]] = [[] for _ in site.models]
        self.waiting: list[collections.deque[engine.Call]] = [
            collections.deque() for _ in site.models
        ]
        self.flying = [0] * len(site.models)
        self.arrived = [0] * len(site.models)
        self.rates = [0.0] * len(site.models)
        self.newest: list[collections.deque[float]] = [
            collections.deque(maxlen=8) for _ in site.models
        ]
        self.starts: list[list[float]] = [[] for _ in site.models]
        self.backlog: list[list[tuple[float, float]]] = [
            [] for _ in site.models
        ]  # deadline, tokens
        self.number = 0
        self.memory = plan.Plan((), (), {})
        self.instant = True
        self.ticked = start_s
        self.capacity = [
            sizing.capacity(
                model.step,
                site.traffic.load,
                kv_tokens=model.shape.kv_tokens,
                seats=model.seats,
                tokens_per_s=site.slo.tokens_per_s * 1.1,
            )
            for model in site.models
        ]
        self.specs = [
            fleet.ReplicaSpec(
                model.name,
                VERSION,
                fleet.EngineKind.SIMULATED,
                seats=model.seats,
                gpus=model.shape.gpus,
                reserved_seats=4,
                itl_slo_ms=1000 / site.slo.tokens_per_s,
            )
            for model in site.models
        ]
        self.index = {model.name: number for number, model in enumerate(site.models)}
        self.curves: dict[str, forecast.Curve] = {}
        self.fixed: dict[int, tuple[int, int]] = {}
        self.batch_rate = [self._batch_rate(model) for model in site.models]

    def at(self, when: float, act: Callable[[float], None]) -> None:
        """Let something happen later."""
        self.order += 1
        heapq.heappush(self.events, (when, self.order, act, -1))

    def schedule(self, one: Running) -> None:
        """Put a replica's next event into the heap; older ones of it no longer count."""
        self.order += 1
        one.event = self.order
        if one.engine.next_at < math.inf:
            heapq.heappush(self.events, (one.engine.next_at, self.order, one, self.order))

    def _batch_rate(self, model: scenario.Model) -> float:
        """Return output tokens/s of a replica that batch has to itself."""
        each = self._engine(model)
        each.feed = "all"
        each.renew()
        return each.batch / (each.step_ms / 1000) if each.step_ms else 1.0

    def _engine(self, model: scenario.Model) -> engine.Engine:
        batch = model.batch
        itl_s = 1 / (self.site.slo.tokens_per_s * SPEED_MARGIN)
        return engine.Engine(
            model.step,
            kv_tokens=model.shape.kv_tokens,
            seats=model.seats,
            chunk=model.chunk,
            itl_s=itl_s,
            shape=engine.BatchShape(batch.prompt, batch.output),
        )
