"""What the broker runs of a document: specs, deployments, routes. Pure."""

import dataclasses
from typing import Any

from scheduler.contracts import fleet
from scheduler.runtime.models import document


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
    ranks = found.tensor_parallel * found.pipeline_parallel
    gpus = found.gpus
    if gpus is None:
        gpus = profile.gpus if profile is not None else ranks
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
        adapters={
            name: one.path
            for name, one in sorted(given.adapters.items())
            if not one.versions or version in one.versions
        },
        dedicated=given.dedicated if found.dedicated is None else found.dedicated,
        itl_slo_ms=slo,
        weights_digest=found.weights_digest,
        tuning=_tuning(found),
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
    unless it says itself how many.
    """
    shadow = model.route.shadow.version if model.route.shadow else ""
    found: list[Deployed] = []
    for each in specs(name, model, profile):
        given = model.versions[each.version]
        used = bool(model.route.versions.get(each.version)) or each.version in kept | {shadow}
        bounds = model.scaling if given.scaling is None else given.scaling
        replicas = given.replicas
        if replicas is None:
            replicas = model.replicas if used else 0
            if not used:
                bounds = {}
        found.append(Deployed(each, replicas, given.role or model.role, bounds))
    return tuple(found)


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
