"""What a leader leaves in the registry for people and for other processes: its plans, and what it knows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.core import targets
from scheduler.runtime import applier, live


def plan(results: Sequence[applier.Result], notes: Sequence[str]) -> dict[str, Any]:
    """Return a plan that was carried out, as `fctl explain` and `fctl show plan` have it."""
    return {
        "actions": [
            {
                "act": type(result.action).__name__,
                "what": applier.describe(result.action),
                "outcome": result.outcome,
            }
            for result in results
        ],
        "notes": list(notes),
    }


def nodes(picture: live.Live, error: str) -> dict[str, Any]:
    """Return what Slurm says of its nodes; ``error``: why that is not new."""
    return {
        "nodes": [
            {
                **dataclasses.asdict(node),
                "flags": sorted(node.flags),
                "unknown_flags": sorted(node.unknown_flags),
            }
            for node in picture.nodes
        ],
        "reservations": [
            {**dataclasses.asdict(kept), "flags": sorted(kept.flags)}
            for kept in picture.reservations
        ],
        "error": error,
    }


def wanted(made: Mapping[tuple[str, str], targets.Target]) -> list[dict[str, Any]]:
    """Return how many replicas of each deployment there should be, and why."""
    return [
        {"model": model, "version": version, **dataclasses.asdict(target)}
        for (model, version), target in made.items()
    ]
