"""How far the estimates of when jobs start were off, by what happened. Pure.

The first word on a job counts: it is what its user planned by. One that the user or an admin has moved since
(held, put on top, given another priority or dependency) is estimated anew, see `queue_acts`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler.contracts import times

LAST = 200  # jobs that are looked at


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A job that has started after somebody had said when; UTC µs."""

    submitted_us: int
    estimated_us: int
    started_us: int

    @property
    def late_s(self) -> float:
        """By how many seconds it started later than was said; below 0: earlier."""
        return (self.started_us - self.estimated_us) / 1e6

    @property
    def ahead_s(self) -> float:
        """How long after its submission it was to start, in seconds."""
        return (self.estimated_us - self.submitted_us) / 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Error:
    """What the newest starts say of the estimates.

    Attributes:
        jobs: how many were looked at; with none the other figures are 0.
        late_s: the median; below 0: jobs start earlier than is said.
        within_s: nine in ten started within so many seconds of what was said, earlier or later.
        ahead_s: the median of how long the jobs were to wait, which the others are to be seen against.
    """

    jobs: int = 0
    late_s: float = 0.0
    within_s: float = 0.0
    ahead_s: float = 0.0

    def public(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return dataclasses.asdict(self)


def error(starts: Iterable[Start]) -> Error:
    """Return how far the estimates were off."""
    found = list(starts)
    if not found:
        return Error()
    return Error(
        len(found),
        round(_rank([each.late_s for each in found], 0.5), 1),
        round(_rank([abs(each.late_s) for each in found], 0.9), 1),
        round(_rank([each.ahead_s for each in found], 0.5), 1),
    )


def _rank(values: Sequence[float], share: float) -> float:
    """Return the least value that so large a share does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def words(said: dict[str, Any]) -> str:
    """Say in one line how far to trust an estimate.

    Args:
        said: an `Error`, as the API shows it.
    """
    if not said["jobs"]:
        return "No job has started yet after an estimate: nothing tells how far off these are."
    late = said["late_s"]
    side = "later" if late >= 0 else "earlier"
    return (
        f"The last {said['jobs']} jobs that were estimated to wait {_shown(said['ahead_s'])} (median) "
        f"started {_shown(abs(late))} {side} than that, nine in ten within {_shown(said['within_s'])}."
    )


def late(job_late_s: float | None) -> str:
    """Return a job's own error for a column: ``+0:12``, ``-1:00:00``, ``N/A``."""
    if job_late_s is None:
        return "N/A"
    return f"{'-' if job_late_s < 0 else '+'}{_shown(abs(job_late_s))}"


def _shown(seconds: float) -> str:
    return times.print_elapsed(round(seconds))
