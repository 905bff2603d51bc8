"""A replica's spec as JSON: in the registry, in launch records, on the way to vLLM's own parser."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet, stored


def write(spec: fleet.ReplicaSpec) -> dict[str, Any]:
    """Return a spec as JSON."""
    return {**dataclasses.asdict(spec), "engine": spec.engine.value}


def read(value: Mapping[str, Any]) -> fleet.ReplicaSpec:
    """Return a spec from JSON."""
    engine = fleet.EngineKind(value["engine"])
    hardware = stored.read(fleet.Hardware, value.get("hardware", {}))
    return stored.read(fleet.ReplicaSpec, value, engine=engine, hardware=hardware)
