"""How many seats to keep free: the arrivals that 99 of 100 abort round trips see, not more. Pure.

A batch sequence that is told to leave frees its seat after one round trip (an engine step or two). An
interactive request that finds a free seat does not wait for that; so the seats that are worth keeping
are the p99 of the interactive arrivals within such a time.
"""

import collections
import math

MEMORY_S = 600.0  # arrivals older than this tell of another hour
LEAST_S = 0.02  # round trips below this are below a step
QUANTILE = 0.99
CHANCE = 3  # windows: one crowd would keep batch out of a young replica for minutes
_MOST = 8192  # arrivals kept


class Arrivals:
    """The interactive arrivals of one replica. Times are monotonic seconds of one clock."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._times: collections.deque[tuple[float, int]] = collections.deque(maxlen=_MOST)

    def note(self, now: float, need: int = 1) -> None:
        """Note that a request for ``need`` seats came."""
        self._times.append((now, need))

    def reserve(self, now: float, round_trip_s: float) -> int:
        """Return the seats to keep free: the p99 of arrivals in windows of one round trip.

        Windows without arrivals count too, so that a replica which sees a request a minute keeps none.
        """
        while self._times and now - self._times[0][0] > MEMORY_S:
            self._times.popleft()
        span = min(MEMORY_S, now - self._began)
        if len(self._times) == _MOST:
            span = now - self._times[0][0]
        width = max(LEAST_S, round_trip_s)
        windows = max(1, math.ceil(span / width))
        counts = collections.Counter[int]()
        for at, need in self._times:
            counts[int((at - self._began) // width)] += need
        above = max(CHANCE, int(windows * (1 - QUANTILE)))  # windows that may see more than is kept
        ranked = sorted(counts.values(), reverse=True)
        return ranked[above] if above < len(ranked) else 0
