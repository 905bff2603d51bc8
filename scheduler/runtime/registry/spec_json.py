"""A replica's spec as the registry keeps it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet


def write(spec: fleet.ReplicaSpec) -> dict[str, Any]:
    """Return a spec as JSON."""
    return {**dataclasses.asdict(spec), "engine": spec.engine.value}


def read(value: Mapping[str, Any]) -> fleet.ReplicaSpec:
    """Return a spec from JSON; keys of a newer release are left out."""
    names = {field.name for field in dataclasses.fields(fleet.ReplicaSpec)}
    known = {key: item for key, item in value.items() if key in names}
    known["hardware"] = hardware(known.get("hardware", {}))
    return fleet.ReplicaSpec(**{**known, "engine": fleet.EngineKind(value["engine"])})


def hardware(value: Mapping[str, Any]) -> fleet.Hardware:
    """Return hardware from JSON; keys of a newer release are left out."""
    names = {field.name for field in dataclasses.fields(fleet.Hardware)}
    return fleet.Hardware(**{key: item for key, item in value.items() if key in names})
