"""`--array`: which tasks, and how many at once. Pure."""

import dataclasses
import re
from collections.abc import Iterable

MOST_TASKS = 1_001  # sbatch's default MaxArraySize
MOST_INDEX = 4_000_000
_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", re.ASCII)


class ArrayError(ValueError):
    """An array that can't be read, or has nothing in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Task numbers in order, and how many may run at once (0: all)."""

    tasks: tuple[int, ...]
    limit: int = 0


def read(text: str) -> Array:
    """Read ``0-15:4%2``, ``1,3,5-7``.

    Raises:
        ArrayError: what is wrong with it.
    """
    body, percent, limit = text.partition("%")
    if percent and not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= MOST_TASKS):
        raise ArrayError(f"{limit!r} tasks at once: give a number from 1 to {MOST_TASKS}")
    found: dict[int, None] = {}
    for part in body.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ArrayError(f"{part[:40]!r}: give tasks as in 0-15, 0-15:4, 1,3,5-7%2")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or not step:
            raise ArrayError(f"{part!r} has no task in it")
        if last > MOST_INDEX or (last - first) // step >= MOST_TASKS:
            raise ArrayError(f"{part!r}: an array has at most {MOST_TASKS} tasks")
        found.update(dict.fromkeys(range(first, last + 1, step)))
    if len(found) > MOST_TASKS:
        raise ArrayError(f"{len(found)} tasks: an array has at most {MOST_TASKS}")
    return Array(tuple(sorted(found)), int(limit) if percent else 0)


def show(tasks: Iterable[int], limit: int = 0) -> str:
    """Return task numbers as squeue shows them: ``0-2,7%2``."""
    runs: list[list[int]] = []
    for task in sorted(tasks):
        if runs and task == runs[-1][1] + 1:
            runs[-1][1] = task
        else:
            runs.append([task, task])
    words = (str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return ",".join(words) + (f"%{limit}" if limit else "")
