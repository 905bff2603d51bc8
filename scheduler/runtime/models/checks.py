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
        for version, each in model.versions.items():
            yield from _version(f"{place}.versions.{version}", each, profile_)
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


def _outside(path: str, folders: Sequence[str]) -> str:
    """Return why a path is in none of the folders; what links do is the inspector's to see."""
    pure = PurePosixPath(path)
    if not folders:
        return "this site takes no adapters: set [scheduler] adapter_folders"
    if not pure.is_absolute() or ".." in pure.parts:
        return f"{path} must be absolute and without `..`"
    if not any(pure.is_relative_to(folder) for folder in folders):
        return f"{path} is outside the allowed folders ({', '.join(folders)}): move it there"
    return ""
