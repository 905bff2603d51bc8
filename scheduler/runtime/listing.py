"""What `fctl show` prints: the answers of /admin as rows of a table."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.contracts import times
from scheduler.core import quota_limits as limits
from slurm_plugins import hostlist


def rows(what: str, answer: Mapping[str, Any], *, detail: bool = False) -> list[dict[str, Any]]:
    """Return what a table of `what` shows, one mapping a row; ``detail``: one thing was asked for by name."""
    if what == "models":
        return [
            _model_row(model, version)
            for model in answer["models"]
            for version in model["versions"]
        ]
    if what == "forecast":
        return [row for model in answer["models"] for row in _forecast_rows(model, detail)]
    if what == "schedules":
        return [*map(_schedule_row, answer["schedules"]), *map(_kept_row, answer["reservations"])]
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
                "gpus": gpus(lease),
                "nodes": ",".join(lease["nodes"]),
                "ends": _ends(lease),
                "reason": lease.get("drain") or lease["reason"],
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
                "reserved": _reserved(node["name"], answer.get("reservations", [])),
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
        wants = [
            {
                "at": when(answer["targets_us"]),
                "act": "wants",
                "what": f"{one['model']} {one['version']}: {target(one)}",
                "outcome": one["reason"],
            }
            for one in answer.get("targets", ())
        ]
        return wants + [
            {
                "at": when(plan["at_us"]),
                "act": action["act"],
                "what": action["what"],
                "outcome": action["outcome"],
            }
            for plan in answer["plans"]
            for action in plan["actions"]
        ]
    if what == "shadows":
        return [shadow(one) for one in answer["shadows"]]
    if what == "quotas":
        return [quota(row) for row in answer["quotas"]]
    return [
        {"at": when(event["at_us"]), "subject": event["subject"], "text": event["text"]}
        for event in answer["events"]
    ]


def gpus(owner: Mapping[str, Any]) -> float:
    """Return the GPUs of a lease or a replica's spec; of shards and such a part of one."""
    return whole(owner["gpus"] / owner.get("hardware", {}).get("parts", 1))


def whole(number: float) -> float:
    """Return whole numbers as people write them, others with two digits."""
    return int(number) if number == int(number) else round(number, 2)


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
        "gpus": gpus(spec),
        "lease": replica["lease_id"],
        "node": _nodes(replica),
        "reason": replica["reason"],
    }


def _nodes(replica: Mapping[str, Any]) -> str:
    """Return the nodes that a replica goes over, rank 0 first."""
    return ",".join(replica.get("nodes") or ()) or str(replica["node"])


def shadow(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what copies have told of a shadow version; pairs are the caller's and the copy's."""
    caller, copy = one.get("caller", {}), one.get("copy", {})

    def both(name: str) -> str:
        return f"{caller.get(name, 0):g}/{copy.get(name, 0):g}"

    return {
        "model": one["model"],
        "shadow": one["version"],
        "percent": one["percent"],
        "copies": one.get("copies", 0),
        "dropped": _counts(one.get("dropped", {})),
        "same": one.get("same", 0),
        "differs": one.get("differs", 0),
        "failed": both("failed"),
        "ttft_ms": both("ttft_ms"),
        "total_ms": both("total_ms"),
        "tokens": both("tokens"),
        "worse": one.get("worse", ""),
    }


def target(target: Mapping[str, Any]) -> str:
    """Return what the planner wants of a deployment."""
    lent = f", {target['lent']} lent to batch" if target["lent"] else ""
    return f"{target['need']} needed{lent}"


def signals(signal: Mapping[str, Any]) -> str:
    """Return what a need was worked out from, one line."""
    parts = [
        f"{signal['serving']} serving, {signal['coming']} coming",
        f"{signal['waiting']} waiting ({signal['oldest_wait_s']:.1f} s), {signal['in_flight']} in flight",
        *([f"{signal['standard']:.0%} of them standard"] if signal.get("standard") else []),
        f"TTFT {signal['ttft_ms']:.0f} ms",
        f"{signal['itl_ms']:.1f} ms a token",
        f"KV {signal['kv']:.0%}",
    ]
    if signal["rate"] is not None:
        parts.append(f"{signal['rate']:.2f} requests/s")
    if signal["outlook"] is not None:
        parts.append(f"{signal['outlook']:.2f} requests/s possible by the forecast")
    if signal["floor"]:
        parts.append(f"floor {signal['floor']} by schedule {signal['floor_name']}")
    return ", ".join(parts)


def wished(wishes: Mapping[str, Any]) -> list[str]:
    """Return what admins want for now, a line each."""
    batch = wishes["batch"]
    found = [f"batch is held everywhere by {_who(batch)}"] if batch else []
    found += [f"{name} drains, by {_who(mark)}" for name, mark in sorted(wishes["drains"].items())]
    return found


def _who(mark: Mapping[str, Any]) -> str:
    return f"{mark['by']}: {mark['reason']}" if mark["reason"] else str(mark["by"])


def _model_row(model: Mapping[str, Any], version: Mapping[str, Any]) -> dict[str, Any]:
    wants = version.get("target")
    return {
        "model": model["model"],
        "version": version["version"],
        "wanted": wants["need"] + wants["lent"] if wants else version["wanted"],
        "lent": wants["lent"] if wants else 0,
        "serving": version["states"].get("serving", 0),
        "expects": _expected(model.get("forecast")),
        "gpus": version["gpus"],
        "role": "hold" if model["hold_batch"] else version["role"],
        "tiers": ",".join(model["tiers"]),
        "reason": version["quarantine_reason"] or (wants["reason"] if wants else ""),
    }


def _expected(guess: Mapping[str, Any] | None) -> str:
    """Return what the next hour may bring: the most of it, and how sure that is."""
    return "" if guess is None else f"{guess['upper']:.2f}/s ({guess['sure']:.0%} sure)"


def _forecast_rows(model: Mapping[str, Any], detail: bool) -> list[dict[str, Any]]:
    hours = model["hours"] if detail else model["hours"][:1]
    return [
        {
            "model": model["model"],
            "at": when(hour["at_us"]),
            "expected": f"{hour['mean']:.2f}/s",
            "possible": f"{hour['upper']:.2f}/s",
            "sure": f"{hour['sure']:.0%}",
            "counts": "yes" if hour["counts"] else "no",
            "days": model["days"],
            "stays": f"{model['held_s']:.1f} s",
        }
        for hour in hours
    ]


def _schedule_row(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": one["name"],
        "kind": "floor",
        "what": f"{one['model']} {one['floor']}",
        "begins": one["next"] or "never",
        "ends": f"{one['until']} {one['zone']}",
        "state": "paused" if one["paused"] else "in force" if one["in_force"] else "waiting",
    }


def _kept_row(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": kept["name"],
        "kind": "maintenance" if "MAINT" in kept["flags"] else "reservation",
        "what": hostlist.compress(kept["nodes"]) or "licences",
        "begins": when(kept["starts_us"]),
        "ends": when(kept["ends_us"]),
        "state": ",".join(kept["flags"]),
    }


def _reserved(node: str, reservations: Sequence[Mapping[str, Any]]) -> str:
    """Return the next reservation of a node, from when on."""
    mine = sorted(
        (kept["starts_us"], kept["name"]) for kept in reservations if node in kept["nodes"]
    )
    return f"{mine[0][1]} from {when(mine[0][0])}" if mine else ""


def _ends(lease: Mapping[str, Any]) -> str:
    if not lease["started_us"] or not lease["walltime_s"]:
        return ""
    return when(lease["started_us"] + lease["walltime_s"] * 1_000_000)


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
    return times.print_point(at_us, times.local_zone(os.environ))


def _counts(tiers: Mapping[str, int]) -> str:
    return ",".join(f"{tier}:{count}" for tier, count in sorted(tiers.items()) if count) or "0"


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)
