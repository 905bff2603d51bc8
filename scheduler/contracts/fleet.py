"""Leases, slots and replicas as the broker, the agents and the gateways see them."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import ids


class LeaseKind(enum.StrEnum):
    """What Slurm may do to a lease: nothing (`serve`), or preempt it (`backfill`)."""

    SERVE = "serve"
    BACKFILL = "backfill"


class LeaseState(enum.StrEnum):
    """A lease's life, in Forebay's words; `UNKNOWN` is never read as ended."""

    REQUESTED = "requested"  # written down, not yet confirmed by Slurm
    PENDING = "pending"  # in Slurm's queue
    RUNNING = "running"
    CLOSING = "closing"  # given back: draining, then cancelled
    ENDED = "ended"  # final
    UNKNOWN = "unknown"


class ReplicaState(enum.StrEnum):
    """A replica's life; which event leads where is `scheduler.core.replicas`."""

    STARTING = "starting"
    WARM = "warm"  # loaded, not yet taking requests
    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    STOPPED = "stopped"  # final
    QUARANTINED = "quarantined"  # failed to start too often
    LOST = "lost"  # final


class Role(enum.StrEnum):
    """What a replica may take now."""

    INTERACTIVE = "interactive"
    SHARED = "shared"
    BATCH = "batch"


class EngineKind(enum.StrEnum):
    """Which engine serves a model."""

    VLLM = "vllm"
    HTTP = "http"  # any OpenAI-compatible server
    SIMULATED = "simulated"


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How to start a replica: everything that the slot's supervisor needs to know.

    Attributes:
        model: the served name.
        version: its version.
        engine: which engine.
        weights: a local path to the model's folder or a place to stage it from (vLLM; `contracts.weights`), a
            base URL (HTTP), or "" (simulated).
        engine_args: engine arguments by long option name without dashes (`max-num-seqs`: 8);
            a true value means the bare flag. Checked by the engine's adapter.
        seats: sequences that run at once (vLLM's max-num-seqs).
        reserved_seats: seats that batch never takes.
        max_context: tokens of prompt plus output.
        gpus: GPUs that it needs.
        adapters: LoRA adapter names and their local paths.
        dedicated: the team whose floor its replicas are, which pays for them idle or not; "" for nobody's.
        itl_slo_ms: inter-token latency that its interactive answers are promised, ms.
        weights_digest: `weights.Manifest.digest` that staged weights must have; "": whatever the place has.
        tuning: engine settings that Forebay knows by type (`contracts.tuning`), as JSON values.
    """

    model: str
    version: str
    engine: EngineKind
    weights: str = ""
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seats: int = 8
    reserved_seats: int = 1
    max_context: int = 2048
    gpus: int = 1
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dedicated: str = ""
    itl_slo_ms: float = 25.0
    weights_digest: str = ""
    tuning: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica says of itself every 200 ms.

    Attributes:
        at_us: UTC µs when it was taken, on the replica's clock.
        seats: seats in all.
        interactive: sequences of tiers interactive and standard that run now.
        batch: sequences of tier batch that run now.
        kv_blocks: KV blocks in all.
        kv_free: of these, free or evictable.
        output_tokens_total: tokens sampled since start.
        preempted_total: batch sequences aborted for interactive work since start.
        reclaim_ms: the newest rung-0 reclaims, milliseconds from order to free seat, at most 32.
        step_ms: the engine's newest step time in milliseconds, 0 if it does not say.
        kv_block_tokens: tokens that a KV block holds, 0 if it does not say.
        queued: of the sequences, those that wait inside the engine.
        ttft_ms: median time to first token of the newest requests, from their seat, 0 without any.
        tokens_per_s: tokens sampled a second, over the last seconds.
        batch_room: batch sequences that it would still let in; -1 if it does not say.
    """

    at_us: int
    seats: int
    interactive: int = 0
    batch: int = 0
    kv_blocks: int = 0
    kv_free: int = 0
    output_tokens_total: int = 0
    preempted_total: int = 0
    reclaim_ms: tuple[float, ...] = ()
    step_ms: float = 0.0
    kv_block_tokens: int = 0
    queued: int = 0
    ttft_ms: float = 0.0
    tokens_per_s: float = 0.0
    batch_room: int = -1

    @property
    def kv_utilisation(self) -> float:
        """Part of the KV blocks that running sequences hold, in [0, 1]."""
        return 1 - self.kv_free / self.kv_blocks if self.kv_blocks else 0.0

    @property
    def free(self) -> int:
        """Seats that nobody holds."""
        return max(0, self.seats - self.interactive - self.batch)


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """One replica as the broker publishes it and the gateways route to it.

    Attributes:
        address: ``host:port`` of its HTTP server, "" while it starts.
        incarnation: grows each time something listens anew under this replica id's registration.
        secret_file: path of the 0600 file that holds the bearer secret of every path of it.
        reason: why it is in this state, one line, or "".
        phases_s: start-up phases and their seconds (queue, import, load, warm-up …).
        staging: its weights are on their way to the node's disk; no start is too slow for that.
    """

    replica_id: ids.ReplicaId
    cluster: str
    lease_id: ids.LeaseId
    slot_id: ids.SlotId
    slurm_job_id: str
    node: str
    spec: ReplicaSpec
    state: ReplicaState
    role: Role
    address: str = ""
    incarnation: int = 0
    secret_file: str = ""
    stats: ReplicaStats | None = None
    reason: str = ""
    phases_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    staging: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A Slurm job that Forebay holds.

    Attributes:
        gpus: over all of its nodes.
        whole_nodes: nodes that are asked for whole; 0: any one node with `gpus`.
        time_min_s: least walltime that is still useful; 0: as the site has set.
        exclude: nodes that it must not start on. All three only matter until the job is submitted.
    """

    lease_id: ids.LeaseId
    cluster: str
    kind: LeaseKind
    team: str
    state: LeaseState
    gpus: int
    gres_type: str = ""
    partition: str = ""
    slurm_job_id: str = ""
    nodes: tuple[str, ...] = ()
    walltime_s: int = 0
    requested_us: int = 0
    started_us: int = 0
    ended_us: int = 0
    reason: str = ""
    whole_nodes: int = 0
    time_min_s: int = 0
    exclude: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Model → version by weight. Weights are percent and add up to 100.

    Attributes:
        callers: teams that may use the model; empty: all.
        tiers: that it is offered in; empty: all.
        adapter_teams: adapter to the one team that may use it; an absent one is everybody's.
        shadow: version that gets copies of `shadow_percent` of the requests; "" for none.
    """

    model: str
    weights: Mapping[str, int]
    max_context: int = 2048
    adapters: tuple[str, ...] = ()
    cluster: str = ""
    callers: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    adapter_teams: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shadow: str = ""
    shadow_percent: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """How one request fared on a version, for the comparison of versions.

    Attributes:
        failed: by the engine or its replica, not by the caller or for want of room.
        ttft_ms: from dispatch to first token, 0 if there was none.
        itl_ms: mean time between tokens, 0 for an answer of one.
    """

    model: str
    version: str
    failed: bool
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that shares the models with others.

    Attributes:
        admission: ``host:port`` where workers of other hosts ask for a turn.
    """

    gateway_id: str
    admission: str


@dataclasses.dataclass(frozen=True, slots=True)
class FleetView:
    """What a gateway knows of the fleet: the newest word of the broker, whole.

    Attributes:
        epoch: the leader's epoch; an older one is ignored.
        revision: grows with every change.
        received: the receiver's own monotonic seconds when it came; the age of the stats.
        gateways: who shares the models, sorted by id; empty where each gateway is alone.
    """

    epoch: int
    revision: int
    routes: Mapping[str, Route]
    replicas: tuple[Replica, ...]
    received: float = 0.0
    gateways: tuple[Gateway, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What one gateway has waiting for one model, told to the broker every 200 ms.

    Attributes:
        waiting: requests in the queue, by tier.
        in_flight: requests dispatched and not closed, by tier.
        oldest_wait_s: seconds that the head of the interactive queue has waited.
        ttft_ms: newest interactive TTFTs, at most 64.
        arrived: interactive and standard requests that came since the gateway's process began.
    """

    model: str
    waiting: Mapping[str, int]
    in_flight: Mapping[str, int]
    oldest_wait_s: float = 0.0
    ttft_ms: tuple[float, ...] = ()
    arrived: int = 0
