"""What the broker runs of a document: specs, deployments, routes. Pure."""

import dataclasses
from typing import Any

from scheduler.contracts import fleet
from scheduler.runtime.models import document

SLOTS = 8  # of adapters where a version says nothing: each takes GPU memory, used or not

PERCENT = 100  # of CUDA MPS: what Slurm takes a GPU for unless gres.conf says otherwise
CPUS = fleet.Hardware(gres="none")


@dataclasses.dataclass(frozen=True, slots=True)
class Deployed:
    """How much of a version is kept, as the document says."""

    spec: fleet.ReplicaSpec
    replicas: int
    role: fleet.Role
    scaling: dict[str, int | float]


def spec(
    model: str, version: str, given: document.Model, profile: document.Profile | None
) -> fleet.ReplicaSpec:
    """Return how a replica of a version is started."""
    found = given.versions[version]
    gpus = found.gpus
    if gpus is None and profile is not None:
        gpus = units(profile)
    elif gpus is None:
        # What stands in front of an external server computes nothing.
        attached = found.engine is fleet.EngineKind.HTTP
        gpus = 0 if attached else found.tensor_parallel * found.pipeline_parallel
    adapters = {
        name: one.path
        for name, one in sorted(given.adapters.items())
        if not one.versions or version in one.versions
    }
    slo = given.itl_slo_ms if found.itl_slo_ms is None else found.itl_slo_ms
    return fleet.ReplicaSpec(
        model=model,
        version=version,
        engine=found.engine,
        weights=found.weights,
        engine_args=_arguments(found),
        seats=found.seats,
        reserved_seats=found.reserved_seats,
        max_context=found.max_context,
        gpus=gpus,
        adapters=adapters,
        adapter_slots=_slots(found, len(adapters)),
        adapter_host=found.adapter_host,
        dedicated=given.dedicated if found.dedicated is None else found.dedicated,
        itl_slo_ms=slo,
        ttft_slo_ms=given.ttft_slo_ms if found.ttft_slo_ms is None else found.ttft_slo_ms,
        weights_digest=found.weights_digest,
        tuning=_tuning(found),
        hardware=hardware(profile) if gpus or profile is not None else CPUS,
    )


def units(profile: document.Profile) -> int:
    """Return the units of its GRES that a replica on a profile takes."""
    return int(profile.gres.partition(":")[2]) if profile.gres else profile.gpus


def hardware(profile: document.Profile | None) -> fleet.Hardware:
    """Return what a replica on a profile needs of a node."""
    if profile is None:
        return fleet.ANY_NODE
    shared = profile.gres.partition(":")[0]
    return fleet.Hardware(
        gres=shared or ("gpu" if profile.gpus else "none"),
        gres_type=profile.gres_type,
        parts=profile.parts or (PERCENT if shared == "mps" else 1),
        memory_gb=profile.memory_gb,
        cpus=profile.cpus,
        constraint=profile.constraint,
        container=profile.container,
    )


def specs(
    model: str, given: document.Model, profile: document.Profile | None
) -> tuple[fleet.ReplicaSpec, ...]:
    """Return the specs of all versions, by name."""
    return tuple(spec(model, version, given, profile) for version in sorted(given.versions))


def deployed(
    name: str,
    model: document.Model,
    profile: document.Profile | None,
    kept: frozenset[str] = frozenset(),
) -> tuple[Deployed, ...]:
    """Return what is kept of each version.

    A version that answers nothing, is no shadow and is not ``kept`` (a rollout needs it) has no replicas,
    unless it says itself how many. One that is nothing but a shadow or a pool has one replica, which is never
    scaled away: what the model needs says nothing of it.
    """
    beside = {pool.version for pool in model.route.pools}
    if model.route.shadow:
        beside.add(model.route.shadow.version)
    found: list[Deployed] = []
    for each in specs(name, model, profile):
        given = model.versions[each.version]
        route_share = model.route.versions.get(each.version, 0)
        used = bool(route_share) or each.version in kept
        bounds = model.scaling if given.scaling is None else given.scaling
        replicas = given.replicas
        if each.version in beside and not route_share and each.version not in kept:
            if given.scaling is None:
                bounds = {}
            elif bounds:
                bounds = {**bounds, "floor": max(1, bounds.get("floor", 0))}
            replicas = 1 if replicas is None else replicas
        elif replicas is None:
            replicas = model.replicas if used else 0
            if not used:
                bounds = {}
        found.append(Deployed(each, replicas, given.role or model.role, bounds))
    return tuple(found)


def pools(model: document.Model) -> tuple[fleet.Pool, ...]:
    """Return a route's pools, rising."""
    return tuple(
        fleet.Pool(pool.from_tokens, pool.version, model.versions[pool.version].max_context)
        for pool in sorted(model.route.pools, key=lambda pool: pool.from_tokens)
    )


def base_context(model: document.Model) -> int:
    """Return what every version takes that answers by percent: a request must not wait for one that can't."""
    answering = [model.versions[name] for name, share in model.route.versions.items() if share]
    return min((each.max_context for each in answering or model.versions.values()), default=0)


def runner(model: document.Model) -> document.Runner:
    """Return what a model does: all of its versions do the same (`checks`)."""
    return next(
        (each.runner for _, each in sorted(model.versions.items())), document.Runner.GENERATE
    )


def _slots(version: document.Version, adapters: int) -> int:
    """Return how many adapters a replica may run in one batch; an external server's are its own affair."""
    if version.engine is fleet.EngineKind.HTTP:
        return 0
    return min(adapters, SLOTS) if version.adapter_slots is None else version.adapter_slots


def _tuning(version: document.Version) -> dict[str, Any]:
    """Return the typed engine settings, as far as they are not the default."""
    found = version.tuning.model_dump(mode="json", exclude_defaults=True)
    if version.quantization_approval:
        found.setdefault("quantization_approval", version.quantization_approval)
    return found


def _arguments(version: document.Version) -> dict[str, Any]:
    """Return the engine's arguments, with what has a field of its own."""
    found: dict[str, Any] = dict(version.engine_args)
    if version.engine is not fleet.EngineKind.VLLM:
        return found
    if version.dtype:
        found.setdefault("dtype", version.dtype)
    if version.quantization:
        found.setdefault("quantization", version.quantization)
    if version.tensor_parallel > 1:
        found.setdefault("tensor-parallel-size", version.tensor_parallel)
    if version.pipeline_parallel > 1:
        found.setdefault("pipeline-parallel-size", version.pipeline_parallel)
    if version.runner is not document.Runner.GENERATE:
        found.setdefault("runner", "pooling")
        found.setdefault("convert", version.runner.value)
    return found
