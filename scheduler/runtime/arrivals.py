"""Requests a second by model, from the counters that gateways report."""

import collections
import dataclasses

WINDOW_S = 60.0
EVERY_S = 2.0  # between two marks of one counter; a shorter time says little


@dataclasses.dataclass(slots=True)
class _Counter:
    newest: tuple[float, int]
    marks: "collections.deque[tuple[float, int]]"


class Rates:
    """The arrivals of the last minute. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], _Counter] = {}

    def note(self, gateway_id: str, model: str, arrived: int, now: float) -> None:
        """Take a gateway's counter; one that went back belongs to a new process."""
        known = self._counters.get((gateway_id, model))
        if known is None or arrived < known.newest[1]:
            marks = collections.deque([(now, arrived)])
            self._counters[gateway_id, model] = _Counter((now, arrived), marks)
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

    def by_model(self) -> dict[str, float]:
        """Return requests a second over the last minute, or as long as there are counters."""
        found: dict[str, float] = {}
        for (_, model), known in self._counters.items():
            since, before = known.marks[0]
            at, arrived = known.newest
            rate = (arrived - before) / max(at - since, EVERY_S)
            found[model] = found.get(model, 0.0) + rate
        return found
