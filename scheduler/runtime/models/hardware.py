"""Whether any node of a site could ever hold a replica on a profile. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.runtime.models import document

_MB = 1_000_000


def fault(profile: document.Profile, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return why no node satisfies ``profile``, as one line with the fix; "" if one does.

    Args:
        profile: what is asked of a node.
        nodes: what Slurm says of them, as the broker's fact `nodes` has it; none: nothing is known, and
            nothing is refused. What Slurm does not say of a node does not rule it out.
    """
    typed = [node for node in nodes if _type(node, profile.gres_type)]
    if nodes and not typed:
        known = sorted({str(node.get("gres_type") or "untyped") for node in nodes})
        return f"gres_type {profile.gres_type}: no node has it; nodes have {', '.join(known)}"
    large = [node for node in typed if _least(node.get("gpus"), profile.gpus)]
    if typed and not large:
        most = max(int(node["gpus"]) for node in typed)
        return f"gpus {profile.gpus}: the largest node has {most}; lower it"
    need_mb = profile.memory_gb * 1000 * _MB / (1 << 20)
    if large and not any(_least(node.get("memory_mb") or None, need_mb) for node in large):
        most_gb = max(int(node["memory_mb"]) for node in large) * (1 << 20) / 1e9
        return f"memory_gb {profile.memory_gb:g}: the largest such node has {most_gb:.0f}; lower it"
    return ""


def _type(node: Mapping[str, Any], wanted: str) -> bool:
    has = str(node.get("gres_type") or "")
    return not wanted or not has or has.lower() == wanted.lower()


def _least(has: int | None, needed: float) -> bool:
    return has is None or has >= needed
