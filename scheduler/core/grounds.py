"""Which nodes could hold a lease: by partition, units, type, features, CPUs and memory.

What Slurm does not say of a node rules it out of nothing but units: a node whose GPUs nobody knows has none.
"""

import dataclasses
import re
from collections.abc import Iterable

from scheduler.contracts import fleet, slurm

_MB = 1 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:=/-]*")
# A constraint that every node must meet, name by name; of others (`|`, `*`, `[]`) Slurm is the judge.
_ALL_OF = re.compile(r"[^|*()\[\]]*")


@dataclasses.dataclass(frozen=True, slots=True)
class Grounds:
    """Where the site lets leases start that say nothing else themselves.

    Attributes:
        serve, backfill: partitions; empty: Slurm's default, which may be any.
        gres_type, constraint: what is asked of nodes; "": nothing.
    """

    serve: tuple[str, ...] = ()
    backfill: tuple[str, ...] = ()
    gres_type: str = ""
    constraint: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a lease needs.

    Attributes:
        units: of its hardware, over all its nodes.
        nodes: whole ones; 0: one node or less.
    """

    kind: fleet.LeaseKind
    hardware: fleet.Hardware
    units: int
    nodes: int = 0

    @property
    def count(self) -> int:
        """Return how many nodes it goes over."""
        return max(1, self.nodes)

    @property
    def gpus(self) -> int:
        """Return the whole GPUs of each node that it takes part of."""
        return self.hardware.whole(self.units) // self.count


def of_lease(lease: fleet.Lease) -> Wanted:
    """Return what a lease was asked with."""
    hardware = lease.hardware
    if lease.gres_type:
        hardware = dataclasses.replace(hardware, gres_type=lease.gres_type)
    return Wanted(lease.kind, hardware, lease.gpus, lease.whole_nodes)


def able(nodes: Iterable[slurm.Node], wanted: Wanted, where: Grounds) -> list[slurm.Node]:
    """Return the nodes that could hold (a node's part of) a lease, in use or not."""
    return [node for node in nodes if _could(node, wanted, where)]


def meets(constraint: str, features: Iterable[str] | None) -> bool:
    """Return whether a node has all features that a plain constraint names."""
    if features is None or not _ALL_OF.fullmatch(constraint):
        return True
    return set(names(constraint)) <= set(features)


def names(constraint: str) -> list[str]:
    """Return the features that a constraint names."""
    return _NAME.findall(re.sub(r"\*\d+", "", constraint))


def _could(node: slurm.Node, wanted: Wanted, where: Grounds) -> bool:
    hardware, count = wanted.hardware, wanted.count
    open_to = where.serve if wanted.kind is fleet.LeaseKind.SERVE else where.backfill
    if open_to and node.partitions and not set(open_to) & set(node.partitions):
        return False
    if hardware.shared and node.shared.get(hardware.gres, 0) < wanted.units // count:
        return False
    if hardware.gres != "none":
        kind = (hardware.gres_type or where.gres_type).lower()
        if (node.gpus or 0) < wanted.gpus or (kind and node.gres_type.lower() not in {"", kind}):
            return False
    if node.cpus and hardware.cpus / count > node.cpus:
        return False
    if node.memory_mb and hardware.memory_gb * 1e9 / _MB / count > node.memory_mb:
        return False
    return meets(hardware.constraint or where.constraint, node.features)
