"""Who gets the GPUs that interactive callers do not need now: batch work, by deadline, then in proportion.

Nothing that has work goes without while GPUs are left over, and a share changes only when it is off by more
than a cold start is worth, so that replicas do not come and go.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

Key = tuple[str, str]
OFF = 0.3  # a share that is off by less is left alone
LEAST_LEFT_S = 600.0  # a deadline nearer than that counts as that near


@dataclasses.dataclass(frozen=True, slots=True)
class Backlog:
    """A model's batch work.

    Attributes:
        work_s: seconds that one replica given to batch alone would take for all of it.
        deadline_s: seconds until the earliest deadline, infinity without one.
        lines: lines left.
    """

    work_s: float
    deadline_s: float = math.inf
    lines: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """One deployment that batch work could use.

    Attributes:
        gpus: of a replica.
        backlog: its work.
        current: replicas lent to it now.
        floor: kept lent, work or none; `minimum`: while there is work; `maximum`: 0: no bound.
        young: of the current ones, those that have not run for their minimum time yet.
        short: of the current ones, those that its own interactive callers need now: they only have to turn
            (rung 1), while another's would have to go and one of its own be started in their place.
    """

    key: Key
    gpus: int
    backlog: Backlog
    current: int = 0
    floor: int = 0
    minimum: int = 0
    maximum: int = 0
    young: int = 0
    short: int = 0

    @property
    def least(self) -> int:
        """Return the fewest that it should have."""
        return max(self.floor, self.minimum if self.backlog.work_s > 0 else 0)


def lend(spare_gpus: int, wants: Sequence[Want], *, settled: bool = True) -> Mapping[Key, int]:
    """Return how many replicas each gets; their GPUs together never exceed ``spare_gpus``.

    Args:
        spare_gpus: GPUs beyond the interactive need.
        wants: those with batch work, and those that still hold lent replicas.
        settled: shares may be moved now; false: only what does not fit any more is taken back.
    """
    ideal = _ideal(spare_gpus, wants)
    given = {want.key: _keep(want, ideal[want.key], settled) for want in wants}
    sizes = {want.key: want.gpus for want in wants}
    turned = {want.key: want.current - want.short for want in wants if want.short}
    young = {want.key: want.young for want in wants}
    least = {want.key: want.least for want in wants}
    _cut(given, ideal, (sizes, spare_gpus), turned, (young, least))
    left = spare_gpus - sum(given[key] * sizes[key] for key in given)
    # What is left over goes to who is furthest below its share.
    while True:
        open_wants = [
            want
            for want in wants
            if want.gpus <= left and want.backlog.work_s > 0 and given[want.key] < _most(want)
        ]
        if not open_wants:
            return given
        best = max(
            open_wants, key=lambda want: (ideal[want.key] - given[want.key], want.gpus, want.key)
        )
        given[best.key] += 1
        left -= best.gpus


def _most(want: Want) -> float:
    # More replicas than minutes of work would start for nothing.
    useful = math.ceil(want.backlog.work_s / LEAST_LEFT_S)
    return min(useful, want.maximum) if want.maximum else useful


def _ideal(spare_gpus: int, wants: Sequence[Want]) -> dict[Key, float]:
    """Share ``spare_gpus``: by deadline what meets it, then the rest in proportion to the work."""
    found = {want.key: 0.0 for want in wants}
    left = float(spare_gpus)
    for want in sorted(wants, key=lambda want: (want.backlog.deadline_s, want.key)):
        if math.isinf(want.backlog.deadline_s):
            continue
        due = want.backlog.work_s / max(LEAST_LEFT_S, want.backlog.deadline_s)
        got = min(due, _most(want), left / want.gpus)
        found[want.key] = got
        left -= got * want.gpus
    total = sum(want.backlog.work_s * want.gpus for want in wants)
    if total > 0 and left > 0:
        for want in wants:
            more = left * want.backlog.work_s / total
            found[want.key] = min(_most(want), found[want.key] + more)
    return found


def _keep(want: Want, ideal: float, settled: bool) -> int:
    """Return what it keeps or gets at first: its present number if that is near enough to its share."""
    if want.backlog.work_s <= 0:
        return want.floor
    least = max(want.least, want.young)
    if want.current and (not settled or abs(ideal - want.current) <= max(1.0, OFF * want.current)):
        return min(max(least, want.current), want.maximum or want.current + least)
    return max(least, math.floor(ideal))


def _cut(
    given: dict[Key, int],
    ideal: Mapping[Key, float],
    room: tuple[Mapping[Key, int], int],
    turned: Mapping[Key, int],
    kept: tuple[Mapping[Key, int], Mapping[Key, int]],
) -> None:
    """Take back until it fits: what is turned anyway, then from who is furthest above its share.

    What has not run for its least time goes late: nobody's larger share is worth a start that did nothing.
    Last goes what a floor keeps: then the callers' own floors need it.

    Args:
        given: what each has; changed.
        ideal: its share.
        room: GPUs of a replica of each, and what there is.
        turned: what would be left to those whose own callers need some of theirs.
        kept: how many of each have not run for their least time, and its fewest.
    """
    sizes, spare = room
    young, least = kept
    while sum(given[key] * sizes[key] for key in given) > max(0, spare):
        held = [key for key in given if given[key] > 0]
        victim = max(
            held,
            key=lambda key: (
                given[key] > least[key],
                given[key] > turned.get(key, given[key]),
                given[key] > young[key],
                given[key] - ideal[key],
                key,
            ),
        )
        given[victim] -= 1
