"""Floors that a schedule sets: so many replicas of a model from one time to another. Pure input.

Who reads the cron expressions (`scheduler.runtime`) hands over what is in force and what comes next; here a
floor counts early enough for its replicas to be warm when it begins.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """One firing of a schedule.

    Attributes:
        name: the schedule's.
        replicas: kept warm at least.
        starts_s, ends_s: seconds from now; a start in the past is negative.
    """

    name: str
    model: str
    replicas: int
    starts_s: float
    ends_s: float


def floor_of(model: str, floors: Iterable[Floor], lead_s: float) -> tuple[int, str]:
    """Return the highest floor that counts now for a model, and the schedule's name (0, "" for none).

    Args:
        model: the served name.
        floors: what is in force and what comes.
        lead_s: how long a replica takes to come up.
    """
    counted = [
        floor
        for floor in floors
        if floor.model == model and floor.starts_s <= lead_s and floor.ends_s > 0
    ]
    best = max(counted, key=lambda floor: (floor.replicas, floor.name), default=None)
    return (best.replicas, best.name) if best else (0, "")
