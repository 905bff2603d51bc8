"""Two clusters: each serves its own callers; batch work may go to the one that has GPUs to spare.

Work moves only when it would miss its deadline at home and another cluster would finish it in time after all
of its own; the least that helps is moved, and never back within the same decision.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

LEAST_S = 1800.0  # GPU-seconds: less is not worth loading a model for
MARGIN = 0.9  # of the time left is planned with


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A model's batch work in one cluster: GPU-seconds, and seconds until its earliest deadline."""

    gpu_s: float
    deadline_s: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One cluster.

    Attributes:
        spare_gpus: GPUs that its interactive callers leave, on average until the deadlines.
        works: model to its batch work.
        serves: models whose weights it has.
    """

    cluster: str
    spare_gpus: float
    works: Mapping[str, Work]
    serves: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """So many GPU-seconds of a model's work go from one cluster to another."""

    model: str
    gpu_s: float
    source: str
    target: str
    reason: str


def decide(sides: Sequence[Side]) -> list[Move]:
    """Return what batch work should move."""
    moves: list[Move] = []
    room = {side.cluster: _room(side) for side in sides}
    for side in sides:
        late = _late(side)
        for model, gpu_s in late.items():
            left = side.works[model].deadline_s * MARGIN
            for other in sorted(sides, key=lambda each: -room[each.cluster]):
                free = room[other.cluster] * left
                moved = min(gpu_s, free)
                if other is side or model not in other.serves or moved < LEAST_S or _late(other):
                    continue
                room[other.cluster] -= moved / left
                reason = (
                    f"{gpu_s:.0f} GPU-seconds would miss their deadline in {left:.0f} s at home, "
                    f"{other.cluster} has {room[other.cluster]:.1f} GPUs left then"
                )
                moves.append(Move(model, moved, side.cluster, other.cluster, reason))
                break
    return moves


def _late(side: Side) -> dict[str, float]:
    """Return the GPU-seconds of each model that would not be done in time, by deadline."""
    found: dict[str, float] = {}
    done = 0.0
    for model, work in sorted(side.works.items(), key=lambda item: (item[1].deadline_s, item[0])):
        done += work.gpu_s
        over = done - side.spare_gpus * work.deadline_s * MARGIN
        if math.isfinite(work.deadline_s) and over > 0 and work.deadline_s > 0:
            found[model] = min(work.gpu_s, over)
            done -= found[model]
    return found


def _room(side: Side) -> float:
    """Return the GPUs that are left after a cluster's own work is done in time."""
    needed = sum(
        work.gpu_s / max(LEAST_S, work.deadline_s) if math.isfinite(work.deadline_s) else 0.0
        for work in side.works.values()
    )
    return max(0.0, side.spare_gpus - needed)
