"""A replica's spec as JSON: in the registry, in launch records, on the way to vLLM's own parser."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet, stored

_ENGINES = frozenset(fleet.EngineKind)


def write(spec: fleet.ReplicaSpec) -> dict[str, Any]:
    """Return a spec as JSON."""
    return {**dataclasses.asdict(spec), "engine": spec.engine.value}


def read(value: Mapping[str, Any]) -> fleet.ReplicaSpec:
    """Return a spec from JSON, to start it.

    Raises:
        ValueError: an engine that is not known here.
        LookupError, TypeError: it is no spec.
    """
    return _read(value, fleet.EngineKind(value["engine"]))


def of_others(value: Mapping[str, Any], model: str, version: str, gpus: int) -> fleet.ReplicaSpec:
    """Return a spec from JSON that any release may have written, to leave what runs of it as it is.

    An engine that is not known here keeps its word; of what is no spec to this release the rest is kept.
    """
    word = str(value.get("engine", ""))
    known = word in _ENGINES
    engine = fleet.EngineKind(word) if known else fleet.UnknownEngine(word or "unknown")
    try:
        return _read(value, engine)
    except (AttributeError, LookupError, TypeError, ValueError):
        return fleet.ReplicaSpec(model, version, fleet.UnknownEngine(word or "unknown"), gpus=gpus)


def _read(value: Mapping[str, Any], engine: fleet.Engine) -> fleet.ReplicaSpec:
    hardware = stored.read(fleet.Hardware, value.get("hardware", {}))
    return stored.read(fleet.ReplicaSpec, value, engine=engine, hardware=hardware)
