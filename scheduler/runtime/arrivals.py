"""Requests a second by model, or by version, from the counters that gateways report."""

import collections
import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

WINDOW_S = 60.0
EVERY_S = 2.0  # between two marks of one counter; a shorter time says little


@dataclasses.dataclass(slots=True)
class _Counter:
    newest: tuple[float, int]
    marks: "collections.deque[tuple[float, int]]"


Of = TypeVar("Of", bound=Hashable)


class Rates(Generic[Of]):
    """The arrivals of the last minute of whatever is counted. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Of], _Counter] = {}

    def note(self, gateway_id: str, of: Of, arrived: int, now: float) -> None:
        """Take a gateway's counter; one that went back belongs to a new process."""
        known = self._counters.get((gateway_id, of))
        if known is None or arrived < known.newest[1]:
            marks = collections.deque([(now, arrived)])
            self._counters[gateway_id, of] = _Counter((now, arrived), marks)
            return
        known.newest = (now, arrived)
        if now - known.marks[-1][0] >= EVERY_S:
            known.marks.append(known.newest)
        while len(known.marks) > 1 and now - known.marks[1][0] >= WINDOW_S:
            known.marks.popleft()

    def forget(self, gateway_id: str) -> None:
        """A gateway has left: its requests go elsewhere now."""
        for key in [key for key in self._counters if key[0] == gateway_id]:
            del self._counters[key]

    def per_s(self) -> dict[Of, float]:
        """Return requests a second over the last minute, or as long as there are counters."""
        found: dict[Of, float] = {}
        for (_, of), known in self._counters.items():
            since, before = known.marks[0]
            at, arrived = known.newest
            rate = (arrived - before) / max(at - since, EVERY_S)
            found[of] = found.get(of, 0.0) + rate
        return found
