"""Two clusters side by side: each serves its own callers, batch work may overflow to the other.

Both run in the same virtual time, a slice each in turn; what moves is decided by `scheduler.core.overflow`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from scheduler.contracts import fleet
from scheduler.core import overflow
from scheduler.sim import run, scenario, world

EVERY_S = 600.0  # between two decisions: a move is worth a model's start


def simulate(
    sites: Sequence[scenario.Scenario], policy: str, *, overflows: bool = True
) -> dict[str, Any]:
    """Run clusters in step and return each one's figures and the work that moved, in GPU-seconds."""
    running = [
        run.begin(dataclasses.replace(site, seed=site.seed + n), policy)
        for n, site in enumerate(sites)
    ]
    worlds = [here for here, _ in running]
    names = [f"{site.name}-{n}" for n, site in enumerate(sites, 1)]
    moved: list[dict[str, Any]] = []
    due = 0.0
    for edges in zip(*(slices for _, slices in running), strict=False):
        if overflows and edges[0] >= due:
            due = edges[0] + EVERY_S
            sides = [_side(name, here) for name, here in zip(names, worlds, strict=True)]
            for move in overflow.decide(sides):
                source, target = names.index(move.source), names.index(move.target)
                gpu_s = _carry(worlds[source], worlds[target], move)
                moved.append({**dataclasses.asdict(move), "gpu_s": round(gpu_s), "at_s": edges[0]})
    return {
        "clusters": {name: run.finish(here) for name, here in zip(names, worlds, strict=True)},
        "moves": moved,
    }


def _side(name: str, here: world.World) -> overflow.Side:
    """Return what a cluster has to spare now, and its batch work."""
    used = sum(
        here.site.models[one.model].shape.gpus
        for one in here.replicas.values()
        if one.role is not fleet.Role.BATCH and one.state is not fleet.ReplicaState.ASLEEP
    )
    works: dict[str, overflow.Work] = {}
    for n, model in enumerate(here.site.models):
        if here.backlog[n]:
            backlog = here.batch_backlog(n)
            works[model.name] = overflow.Work(
                backlog.work_s * model.shape.gpus, max(0.0, backlog.deadline_s)
            )
    return overflow.Side(
        name,
        max(0.0, here.site.fleet.gpus - used),
        works,
        frozenset(model.name for model in here.site.models),
    )


def _carry(source: world.World, target: world.World, move: overflow.Move) -> float:
    """Move work of one model from one cluster's jobs to the other's; returns GPU-seconds moved."""
    n, other = source.index[move.model], target.index[move.model]
    gpus = source.site.models[n].shape.gpus
    left = move.gpu_s / gpus * source.batch_rate[n]
    carried = 0.0
    while source.backlog[n] and left - carried > 1:
        deadline, tokens = source.backlog[n].pop(0)
        part = min(tokens, left - carried)
        if part < tokens:
            source.backlog[n].insert(0, (deadline, tokens - part))
        target.backlog[other].append((deadline, part))
        carried += part
    target.backlog[other].sort()
    return carried / source.batch_rate[n] * gpus
