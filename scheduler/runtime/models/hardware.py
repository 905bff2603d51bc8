"""Whether any node of a site could ever hold a replica on a profile. Pure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scheduler.core import grounds
from scheduler.runtime.models import compiled, document

_MB = 1_000_000

Node = Mapping[str, Any]
Term = tuple[Callable[[Node], bool], Callable[[Sequence[Node]], str]]
"""Whether a node meets it, and what is said where none of those that met all before does."""


def fault(profile: document.Profile, nodes: Sequence[Node], node_gpus: int = 0) -> str:
    """Return why no node satisfies ``profile``, as one line with the fix; "" if one does.

    Args:
        profile: what is asked of a node.
        nodes: what Slurm says of them, as the broker's fact `nodes` has it; none: nothing is known, and
            nothing is refused. What Slurm does not say of a node does not rule it out.
        node_gpus: GPUs of a node, whole ones of which what is larger goes over; 0: nothing does.
    """
    profile = _of_one_node(profile, node_gpus)
    if said := _unknown_feature(profile.constraint, nodes):
        return said
    left = list(nodes)
    for meets, told in _terms(profile):
        kept = [node for node in left if meets(node)]
        if left and not kept:
            return told(left)
        left = kept
    return ""


def _of_one_node(profile: document.Profile, node_gpus: int) -> document.Profile:
    """Return what each node must give of a profile."""
    over = math.ceil(profile.gpus / node_gpus) if node_gpus and not profile.gres else 1
    if over <= 1:
        return profile
    share = {
        "gpus": node_gpus,
        "memory_gb": profile.memory_gb / over,
        "cpus": math.ceil(profile.cpus / over),
    }
    return profile.model_copy(update=share)


def _terms(profile: document.Profile) -> Iterator[Term]:
    """Yield what one and the same node must meet."""
    yield (
        lambda node: _type(node, profile.gres_type),
        lambda left: f"gres_type {profile.gres_type}: no node has it; nodes have {_types(left)}",
    )
    if profile.gres:
        yield from _parts(profile)
    else:
        yield (
            lambda node: _least(node.get("gpus"), profile.gpus),
            lambda left: (
                f"gpus {profile.gpus}: the largest node has {_most(left, 'gpus')}; lower it"
            ),
        )
    yield (
        lambda node: grounds.meets(profile.constraint, node.get("features")),
        lambda left: (
            f"constraint {profile.constraint}: no node that has the rest has it; leave one out"
        ),
    )
    need_mb = profile.memory_gb * 1000 * _MB / (1 << 20)
    yield (
        lambda node: _least(node.get("memory_mb") or None, need_mb),
        lambda left: (
            f"memory_gb {profile.memory_gb:g}: the largest such node has "
            f"{_most(left, 'memory_mb') * (1 << 20) / 1e9:.0f}; lower it"
        ),
    )
    yield (
        lambda node: _least(node.get("cpus") or None, profile.cpus),
        lambda left: (
            f"cpus {profile.cpus}: the largest such node has {_most(left, 'cpus')}; lower it"
        ),
    )


def _parts(profile: document.Profile) -> Iterator[Term]:
    """Yield what a node must meet that gives such parts of a GPU."""
    kind = profile.gres.partition(":")[0]
    wanted = profile.parts or compiled.PERCENT
    yield (
        lambda node: bool((node.get("shared") or {}).get(kind)),
        lambda left: (
            f"gres {profile.gres}: no node has {kind}; add it to GresTypes, the nodes' Gres and gres.conf, "
            "or take whole GPUs"
        ),
    )

    def told(left: Sequence[Node]) -> str:
        each = sorted({node["shared"][kind] // node["gpus"] for node in left})
        return (
            f"parts {profile.parts}: a GPU here has {' or '.join(map(str, each))} of {kind}; say so"
        )

    yield (
        lambda node: not node.get("gpus") or node["shared"][kind] // node["gpus"] == wanted,
        told,
    )


def _unknown_feature(constraint: str, nodes: Sequence[Node]) -> str:
    """Return which feature that a constraint names no node has, as far as Slurm tells features."""
    told = [node["features"] for node in nodes if node.get("features") is not None]
    if len(told) < len(nodes) or not nodes:
        return ""
    known = {feature for features in told for feature in features}
    for name in grounds.names(constraint):
        if name not in known:
            have = ", ".join(sorted(known)) or "none"
            return f"constraint {constraint}: no node has the feature {name}; nodes have {have}"
    return ""


def _types(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted({str(node.get("gres_type") or "untyped") for node in nodes}))


def _type(node: Node, wanted: str) -> bool:
    has = str(node.get("gres_type") or "")
    return not wanted or not has or has.lower() == wanted.lower()


def _most(nodes: Sequence[Node], name: str) -> int:
    return max(int(node[name]) for node in nodes)


def _least(has: int | None, needed: float) -> bool:
    return has is None or has >= needed
