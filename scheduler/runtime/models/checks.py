"""What a document's parts must say of each other; every fault names its place, and what to do. Pure.

What only a look at files, nodes or the engine's parser can tell is an `Inspector`'s, asked at registration.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.runtime import scaling
from scheduler.runtime.models import compiled, document

FP8 = ("fp8", "w8a8-fp8")


class Inspector(Protocol):
    """Looks at what a document can't say; each method returns a fault as one line, or ""."""

    def version(self, spec: fleet.ReplicaSpec) -> str:
        """Look at a version's weights and engine arguments."""
        ...

    def adapter(self, adapter: document.Adapter, versions: Sequence[fleet.ReplicaSpec]) -> str:
        """Look at an adapter's files, and whether they fit the versions of its model."""
        ...

    def blind(self, spec: fleet.ReplicaSpec) -> str:
        """Return what of a version can't be looked at from here, "" if all can."""
        ...


class Unseen:
    """An inspector that looks at nothing: for documents that were inspected before."""

    def version(self, spec: fleet.ReplicaSpec) -> str:
        """Find nothing."""
        del spec
        return ""

    def adapter(self, adapter: document.Adapter, versions: Sequence[fleet.ReplicaSpec]) -> str:
        """Find nothing."""
        del adapter, versions
        return ""

    def blind(self, spec: fleet.ReplicaSpec) -> str:
        """Say nothing."""
        del spec
        return ""


def faults(
    found: document.Document,
    inspector: Inspector,
    changed: frozenset[document.Key],
    folders: Sequence[str] = (),
) -> Iterator[str]:
    """Yield what is wrong with a document.

    Args:
        found: the document.
        inspector: looks at files and nodes.
        changed: entries that are new or changed: only these are inspected again.
        folders: in which adapters may lie; none: adapters are not taken here.
    """
    for name, model in found.models.items():
        place = f"models.{name}"
        profile_ = found.profiles.get(model.profile)
        if model.profile and profile_ is None:
            known = ", ".join(sorted(found.profiles)) or "none"
            yield f"{place}.profile: {model.profile} is unknown; known are: {known}"
            continue
        yield from _scaled(place, model.scaling)
        yield from _routed(place, model)
        yield from _pools(place, model)
        for version, each in model.versions.items():
            yield from _version(f"{place}.versions.{version}", each, profile_)
        yield from _runners(place, model)
        specs = compiled.specs(name, model, profile_)
        for spec in specs:
            asked = {("version", name, spec.version), ("model", name, "")}
            if changed & asked and (fault := inspector.version(spec)):
                yield f"{place}.versions.{spec.version}: {fault}"
        for adapter in model.adapters:
            new = ("adapter", name, adapter) in changed
            for fault in _adapter(model, adapter, specs, inspector if new else None, folders):
                yield f"{place}.adapters.{adapter}{fault}"


def _adapter(
    model: document.Model,
    name: str,
    specs: Sequence[fleet.ReplicaSpec],
    inspector: Inspector | None,
    folders: Sequence[str],
) -> Iterator[str]:
    """Yield an adapter's faults, each from its own field on; files are looked at by an inspector alone."""
    one = model.adapters[name]
    if any(spec.model == name for spec in specs):
        yield ": bears its model's name, and requests for it would reach the base: name it otherwise"
    for version in one.versions:
        if version not in model.versions:
            known = ", ".join(sorted(model.versions)) or "none"
            yield f".versions: {version} is unknown; known are: {known}"
    if inspector is None:
        return
    if fault := _outside(one.path, folders):
        yield f".path: {fault}"
    elif fault := inspector.adapter(one, [s for s in specs if name in s.adapters]):
        yield f": {fault}"


def _scaled(place: str, given: dict[str, int | float]) -> Iterator[str]:
    try:
        scaling.from_mapping(given)
    except ValueError as error:
        yield f"{place}: {error}"


def _version(
    place: str, version: document.Version, profile: document.Profile | None
) -> Iterator[str]:
    if version.reserved_seats > version.seats:
        yield f"{place}: reserved_seats {version.reserved_seats} exceed seats {version.seats}: lower them"
    if version.engine is not fleet.EngineKind.SIMULATED and not version.weights:
        yield f"{place}: weights missing: engine {version.engine} needs a folder or a URL"
    if version.scaling is not None:
        yield from _scaled(place, version.scaling)
    if version.adapter_slots and version.engine is fleet.EngineKind.HTTP:
        yield f"{place}: adapter_slots: an external server's adapters are its own affair: leave it out"
    if version.adapter_host and version.adapter_host < (version.adapter_slots or 0):
        yield f"{place}: adapter_host {version.adapter_host} is below adapter_slots: every slot's is held too"
    if version.quantization.lower() in FP8 and not version.quantization_approval:
        yield (
            f"{place}: quantization {version.quantization} without quantization_approval: name who has "
            "allowed it for this version"
        )
    ranks = version.tensor_parallel * version.pipeline_parallel
    gpus = version.gpus if version.gpus is not None else (profile.gpus if profile else None)
    if gpus and ranks > gpus:
        yield (
            f"{place}: tensor_parallel × pipeline_parallel is {ranks}, and a replica has {gpus} GPUs: "
            "take a larger profile or lower them"
        )


def _runners(place: str, model: document.Model) -> Iterator[str]:
    """Yield versions that do something else than the first: callers could not know what they get."""
    does = compiled.runner(model)
    for version, each in sorted(model.versions.items()):
        if each.runner is not does:
            first = min(model.versions)
            yield (
                f"{place}.versions.{version}.runner: {each.runner}, and {first} is {does}: all versions of a "
                "model do the same; declare another model"
            )
            return


def _routed(place: str, model: document.Model) -> Iterator[str]:
    route = model.route
    known = ", ".join(sorted(model.versions)) or "none"
    for version in route.versions:
        if version not in model.versions:
            yield f"{place}.route.versions.{version}: unknown version; known are: {known}"
    total = sum(route.versions.values())
    if total != 100 and (route.versions or model.versions):
        if not route.versions:
            yield f"{place}.route: names no version: give one of {known} 100 percent"
        else:
            yield f"{place}.route: percentages add up to {total}: make it 100"
    if route.shadow is not None:
        if route.shadow.version not in model.versions:
            yield f"{place}.route.shadow: {route.shadow.version} is unknown; known are: {known}"
        elif route.versions.get(route.shadow.version) == 100:
            yield f"{place}.route.shadow: {route.shadow.version} answers all requests itself: name another"
        elif fault := _no_copies(model, model.versions[route.shadow.version]):
            yield f"{place}.route.shadow: {route.shadow.version} {fault}"


def _pools(place: str, model: document.Model) -> Iterator[str]:
    """Yield what is wrong with pools: lengths that no version takes, versions without an endpoint."""
    room, last = compiled.base_context(model), 0
    known = ", ".join(sorted(model.versions)) or "none"
    for pool in sorted(model.route.pools, key=lambda pool: pool.from_tokens):
        here = f"{place}.route.pools: {pool.version} from {pool.from_tokens} tokens"
        version = model.versions.get(pool.version)
        if version is None:
            yield f"{here}: is unknown; known are: {known}"
            return
        if pool.from_tokens == last:
            yield f"{here}: another pool begins there too: name one"
        elif pool.from_tokens > room:
            yield f"{here}: prompts of {room} to {pool.from_tokens} tokens fit no version: begin at {room}"
        elif pool.from_tokens >= version.max_context:
            yield f"{here}: its context is {version.max_context}: raise its max_context, or begin earlier"
        elif version.replicas == 0 and not version.scaling:
            yield f"{here}: has no endpoint (replicas = 0 and no scaling): give it replicas"
        room, last = version.max_context, pool.from_tokens


def _no_copies(model: document.Model, version: document.Version) -> str:
    """Return why a version could never take a copy, "" if it can."""
    if version.replicas == 0 and not version.scaling:
        return "has no endpoint (replicas = 0 and no scaling): give it replicas"
    role = version.role or model.role
    if role is fleet.Role.INTERACTIVE:
        return (
            "takes interactive requests alone, and copies are none: give it role = shared or batch"
        )
    if version.reserved_seats >= version.seats:
        return "keeps all of its seats for interactive requests, and copies are none: lower reserved_seats"
    return ""


def _outside(path: str, folders: Sequence[str]) -> str:
    """Return why a path is in none of the folders; what links do is the inspector's to see."""
    if not folders:
        return "this site takes no adapters: set [scheduler] adapter_folders"
    scheme, sign, rest = path.partition("://")
    if sign and scheme != "file":
        allowed = [folder.rstrip("/") + "/" for folder in folders if "://" in folder]
        if ".." in rest.split("/") or not any(f"{path}/".startswith(one) for one in allowed):
            return f"{path} is outside the allowed folders ({', '.join(folders)}): move it there"
        return ""
    pure = PurePosixPath(rest if sign else path)
    if not pure.is_absolute() or ".." in pure.parts:
        return f"{path} must be absolute and without `..`"
    if not any(pure.is_relative_to(folder) for folder in folders):
        return f"{path} is outside the allowed folders ({', '.join(folders)}): move it there"
    return ""
