"""Rows for the accounting tests, with only what a test cares about spelled out."""

import dataclasses
from typing import Any

from scheduler.contracts import usage

DAY_US = 86_400_000_000
NOON = 1_795_780_800_000_000  # 2026-11-27T12:00:00Z

_FIELDS = {field.name for field in dataclasses.fields(usage.Identity)}


def row(
    kind: str = "close", request_id: str = "q1", attempt: int = 1, **more: Any
) -> usage.UsageRow:
    """Return a usage row; names of `Identity` and of `UsageRow` may be mixed."""
    identity = usage.Identity(
        **{
            "request_id": request_id,
            "attempt": attempt,
            "cluster": "c1",
            "team": "red",
            "user": "ann",
            "key_id": "k1",
            "model": "chat",
            "version": "1",
            "adapter": "",
            "endpoint": "/v1/chat/completions",
            "tier": "interactive",
            "replica_id": "r-1",
            "lease_id": "l-1",
            "slurm_job_id": "41",
            "arrived_us": more.get("started_us", NOON),
            "started_us": NOON,
            **{name: value for name, value in more.items() if name in _FIELDS},
        }
    )
    end = {name: value for name, value in more.items() if name not in _FIELDS}
    if kind != "open":
        end = {"outcome": "ok", "ended_us": identity.started_us + 1_000_000, **end}
    end["outcome"] = usage.Outcome(end.get("outcome", "open"))
    end["payer"] = usage.Payer(end.get("payer", "team"))
    return usage.UsageRow(kind=usage.RowKind(kind), identity=identity, **end)


def gpu(seq: int = 0, seconds: float = 60, **more: Any) -> usage.GpuRow:
    """Return a GPU row of ``seconds``, starting where the one before it ended."""
    start = more.pop("start_us", NOON + round(seq * seconds * 1e6))
    return usage.GpuRow(
        **{
            "cluster": "c1",
            "lease_id": "l-1",
            "slurm_job_id": "41",
            "run": 0,
            "node": "n1",
            "team": "red",
            "kind": "serve",
            "gpus": 4,
            "start_us": start,
            "end_us": start + round(seconds * 1e6),
            "seq": seq,
            **more,
        }
    )


def replica(state: str, start_us: int, end_us: int, **more: Any) -> usage.ReplicaTimeRow:
    """Return what a replica did in an interval."""
    return usage.ReplicaTimeRow(
        **{
            "cluster": "c1",
            "lease_id": "l-1",
            "slurm_job_id": "41",
            "replica_id": "r-1",
            "model": "chat",
            "version": "1",
            "gpus": 4,
            "start_us": start_us,
            "end_us": end_us,
            "state": state,
            "seq": 0,
            **more,
        }
    )
