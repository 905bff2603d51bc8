"""Leases, slots and replicas as the broker, the agents and the gateways see them."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import ids, loras


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
    UNKNOWN = "unknown"  # told in a word that only a newer release knows: neither routed nor free

    @classmethod
    def _missing_(cls, value: object) -> "ReplicaState":
        del value
        return cls.UNKNOWN


class Role(enum.StrEnum):
    """What a replica may take now."""

    INTERACTIVE = "interactive"
    SHARED = "shared"
    BATCH = "batch"


_ROLES = frozenset(Role)


def role_of_others(word: str) -> Role:
    """Return a role; in one that only a newer release knows a replica is for callers alone."""
    return Role(word) if word in _ROLES else Role.INTERACTIVE


class EngineKind(enum.StrEnum):
    """Which engine serves a model."""

    VLLM = "vllm"
    HTTP = "http"  # any OpenAI-compatible server
    SIMULATED = "simulated"


class UnknownEngine(str):
    """An engine that only a newer release knows, by its word: nothing is started of it here."""

    __slots__ = ()

    @property
    def value(self) -> str:
        """Return the word."""
        return str(self)


Engine = EngineKind | UnknownEngine


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """What a replica needs of a node, or what a lease has; `ReplicaSpec.gpus`, `Lease.gpus` count its units.

    Attributes:
        gres: the kind of unit: `gpu` whole ones, `shard` or `mps` parts of one that others share, `none` for
            replicas on CPUs, one to a lease.
        gres_type: GPU type as the site spells it; "" for any.
        parts: units that make a whole GPU: 1 of `gpu`; of `shard` as many as gres.conf gives a GPU.
        memory_gb: host memory in 10^9 bytes, a replica's or a lease's; 0: as the site has set.
        cpus: CPUs, a replica's or a lease's; 0: as the site has set.
        constraint: node features, as sbatch takes them.
        container: image that engines run in; "": the site's own.
    """

    gres: str = "gpu"
    gres_type: str = ""
    parts: int = 1
    memory_gb: float = 0.0
    cpus: int = 0
    constraint: str = ""
    container: str = ""

    @property
    def place(self) -> tuple[str, str, int, str, str]:
        """Return what decides whether a replica may go into a lease, beside room."""
        return (self.gres, self.gres_type, self.parts, self.constraint, self.container)

    @property
    def shared(self) -> bool:
        """Whether its units are parts of a GPU."""
        return self.gres in {"shard", "mps"}

    def whole(self, units: int) -> int:
        """Return how many GPUs ``units`` take part of."""
        return -(-units // self.parts)


ANY_NODE = Hardware()


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
        gpus: GPUs that it needs, or units of `hardware`.
        hardware: on what; only leases of such hardware take it.
        adapters: LoRA adapter names and their local paths.
        dedicated: the team whose floor its replicas are, which pays for them idle or not; "" for nobody's.
        itl_slo_ms: inter-token latency that its interactive answers are promised, ms.
        ttft_slo_ms: time to first token that they are promised, ms; 0: as the site says for all.
        weights_digest: `weights.Manifest.digest` that staged weights must have; "": whatever the place has.
        tuning: engine settings that Forebay knows by type (`contracts.tuning`), as JSON values.
        adapter_slots: adapters that may run in one batch; 0: none is loaded at run time.
        adapter_host: adapters that its host memory holds ready, those in slots included; 0: as many as slots.
    """

    model: str
    version: str
    engine: Engine
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
    adapter_slots: int = 0
    adapter_host: int = 0
    ttft_slo_ms: float = 0.0

    @property
    def started(self) -> "ReplicaSpec":
        """It as a replica starts: where adapters are loaded at run time none comes with the process."""
        return dataclasses.replace(self, adapters={}) if self.adapter_slots else self

    hardware: Hardware = ANY_NODE


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
        adapters: those that it has loaded at run time, or tries to; None: those of its spec alone.
        adapter_room: how many it can hold, 0 if it loads none at run time.
        nodes: those that it goes over, by rank; empty: `node` alone.
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
    adapters: tuple[loras.HeldAdapter, ...] | None = None
    adapter_room: int = 0
    nodes: tuple[str, ...] = ()

    @property
    def adapters_ready(self) -> tuple[str, ...]:
        """Adapters that it serves now, by name."""
        if self.adapters is None:
            return tuple(self.spec.adapters)
        ready = loras.AdapterState.LOADED
        return tuple(sorted(one.name for one in self.adapters if one.state is ready))


def spread(units: int, each: int) -> int:
    """Return how many nodes a slot of so many units goes over, where a node has ``each`` of them."""
    return max(1, -(-units // each)) if each else 1


def taken(units: int, each: int) -> int:
    """Return the units that a slot for so many takes: all of its nodes', where it goes over several."""
    over = spread(units, each)
    return over * each if over > 1 else units


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A Slurm job that Forebay holds.

    Attributes:
        gpus: over all of its nodes; units of `hardware`.
        hardware: what it was asked for; its memory is all that the lease has.
        whole_nodes: nodes that it has whole; 0: any one node with `gpus`.
        time_min_s: least walltime that is still useful; 0: as the site has set.
        exclude: nodes that it must not start on. Both only matter until the job runs.
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
    hardware: Hardware = ANY_NODE

    @property
    def node_units(self) -> int:
        """Return the units that it has of each of its nodes."""
        return self.gpus // max(1, self.whole_nodes)

    def spread(self, units: int) -> int:
        """Return how many of its nodes a replica of so many units goes over."""
        return spread(units, self.node_units)

    def taken(self, units: int) -> int:
        """Return its units that a replica of so many keeps from others: whole nodes', if over several."""
        return taken(units, self.node_units)


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Prompts from so many tokens on go to a version of their own, with room for ``max_context``."""

    from_tokens: int
    version: str
    max_context: int


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Model → version by weight. Weights are percent and add up to 100.

    Attributes:
        callers: teams that may use the model; empty: all.
        tiers: that it is offered in; empty: all.
        adapter_teams: adapter to the one team that may use it; an absent one is everybody's.
        adapter_faults: adapter to why no replica can load it, for those that none can.
        preload: adapters that are loaded before anybody asks.
        shadow: version that gets copies of `shadow_percent` of the requests; "" for none.
        pools: versions of long prompts, rising; what needs more than `base_context` goes there too.
        max_context: the most that any of its versions takes.
        base_context: what the versions of `weights` take; 0: `max_context`.
        runner: what its versions do (`requests.Runner`), which says the endpoints that it has; "" where
            that is not told: the engine knows.
        start_s: seconds that a start of its replicas took lately; 0 where none is known.
        wakes: versions of which a request that waits has a replica started where there is none.
    """

    model: str
    weights: Mapping[str, int]
    max_context: int = 2048
    adapters: tuple[str, ...] = ()
    cluster: str = ""
    callers: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    adapter_teams: Mapping[str, str] = dataclasses.field(default_factory=dict)
    adapter_faults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    preload: tuple[str, ...] = ()
    shadow: str = ""
    shadow_percent: int = 0
    runner: str = ""
    start_s: int = 0
    wakes: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = ()
    base_context: int = 0


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
