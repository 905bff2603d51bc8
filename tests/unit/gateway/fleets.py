"""Replicas and the views that gateways have of them, as tests say them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from scheduler.contracts import fleet, ids


def make_replica(name: str, **changes: Any) -> fleet.Replica:
    """Return a serving replica of model chat with 8 seats and fresh statistics."""
    spec_names = {field.name for field in dataclasses.fields(fleet.ReplicaSpec)}
    spec = {
        "model": "chat",
        "version": "1",
        "engine": fleet.EngineKind.SIMULATED,
        "adapters": {"poet": "/adapters/poet"},
        **{key: changes.pop(key) for key in list(changes) if key in spec_names},
    }
    fields: dict[str, Any] = {
        "replica_id": ids.ReplicaId(name),
        "cluster": "c1",
        "lease_id": ids.LeaseId("l-1"),
        "slot_id": ids.SlotId("l-1.s0"),
        "slurm_job_id": "4711",
        "node": "n1",
        "state": fleet.ReplicaState.SERVING,
        "role": fleet.Role.SHARED,
        "address": "127.0.0.1:1",
        "incarnation": 1,
        "stats": fleet.ReplicaStats(at_us=1, seats=8),
        **changes,
    }
    return fleet.Replica(spec=fleet.ReplicaSpec(**spec), **fields)


def make_view(
    replicas: Sequence[fleet.Replica], revision: int = 1, **route: Any
) -> fleet.FleetView:
    """Return a view with model chat, version 1, adapter poet."""
    fields = {"weights": {"1": 100}, "max_context": 2048, "adapters": ("poet",), **route}
    return fleet.FleetView(1, revision, {"chat": fleet.Route("chat", **fields)}, tuple(replicas))
