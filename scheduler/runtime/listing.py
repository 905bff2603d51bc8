"""What `fctl show` prints: the answers of /admin as rows of a table."""

import datetime
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import times
from scheduler.core import quota_limits as limits


def rows(what: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a table of `what` shows, one mapping a row."""
    if what == "models":
        return [
            {
                "model": model["model"],
                "version": version["version"],
                "wanted": version["wanted"],
                "serving": version["states"].get("serving", 0),
                "gpus": version["gpus"],
                "role": "hold" if model["hold_batch"] else version["role"],
                "tiers": ",".join(model["tiers"]),
                "reason": version["quarantine_reason"],
            }
            for model in answer["models"]
            for version in model["versions"]
        ]
    if what == "replicas":
        return [_replica_row(replica) for replica in answer["replicas"]]
    if what == "leases":
        return [
            {
                "lease": lease["lease_id"],
                "job": lease["slurm_job_id"],
                "kind": lease["kind"],
                "team": lease["team"],
                "state": lease["state"],
                "gpus": lease["gpus"],
                "nodes": ",".join(lease["nodes"]),
                "reason": lease["reason"],
            }
            for lease in answer["leases"]
        ]
    if what == "nodes":
        return [
            {
                "node": node["name"],
                "state": "+".join(
                    [node["state"], *node["flags"], *(["cordoned"] if node["cordon"] else [])]
                ),
                "gpus": _known(node["gpus"]),
                "free": _known(node["gpus_free"]),
                "type": node["gres_type"] or "any",
                "partitions": ",".join(node["partitions"]),
                "reason": node["cordon"]["reason"] if node["cordon"] else node["reason"],
            }
            for node in answer["nodes"]
        ]
    if what == "queue":
        return [
            {
                "model": name,
                "waiting": _counts(demand["waiting"]),
                "in_flight": _counts(demand["in_flight"]),
                "oldest_s": f"{demand['oldest_wait_s']:.1f}",
            }
            for name, demand in sorted(answer["queue"].items())
        ]
    if what == "plan":
        return [
            {
                "at": when(plan["at_us"]),
                "act": action["act"],
                "what": action["what"],
                "outcome": action["outcome"],
            }
            for plan in answer["plans"]
            for action in plan["actions"]
        ]
    if what == "quotas":
        return [quota(row) for row in answer["quotas"]]
    return [
        {"at": when(event["at_us"]), "subject": event["subject"], "text": event["text"]}
        for event in answer["events"]
    ]


def _replica_row(replica: Mapping[str, Any]) -> dict[str, Any]:
    stats = replica["stats"] or {}
    spec = replica["spec"]
    busy = f"{stats.get('interactive', 0)}+{stats.get('batch', 0)}/{spec['seats']}"
    return {
        "replica": replica["replica_id"],
        "model": spec["model"],
        "version": spec["version"],
        "state": replica["state"],
        "role": replica["role"],
        "seats": busy,
        "gpus": spec["gpus"],
        "lease": replica["lease_id"],
        "node": replica["node"],
        "reason": replica["reason"],
    }


def quota(row: Mapping[str, Any]) -> dict[str, str]:
    """Return what a table shows of a quota."""
    kind, used = limits.Kind(row["kind"]), row["used"]
    share = f"{used * 100 // row['amount']}%" if used is not None and row["amount"] else ""
    return {
        "team": row["team"],
        "for": quota_owner(row),
        "model": row["model"] or "all",
        "tier": row["tier"] or "all",
        "kind": row["kind"],
        "limit": kind.show(row["amount"]) + ("" if row["hard"] else " soft"),
        "used": "each" if used is None else kind.show(used),
        "share": share,
        "state": row["state"],
        "resets": when(row["resets_us"]) if row["resets_us"] else "",
        "drift": kind.show(row["drift"]) if row["checked_us"] else "",
        "by": row["author"],
        "reason": row["reason"],
    }


def quota_owner(row: Mapping[str, Any]) -> str:
    """Return whose use of a team a quota counts."""
    return "team" if row["scope"] == limits.Scope.TEAM else f"{row['scope']} {row['name']}"


def when(at_us: int) -> str:
    """Return UTC µs as the reader's local time, as sacct prints it."""
    zone = datetime.datetime.now().astimezone().tzinfo or datetime.UTC
    return times.print_point(at_us, zone)


def _counts(tiers: Mapping[str, int]) -> str:
    return ",".join(f"{tier}:{count}" for tier, count in sorted(tiers.items()) if count) or "0"


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)
