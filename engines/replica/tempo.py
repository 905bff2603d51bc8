"""How fast a replica is of late: time to first token, and tokens a second, for its statistics."""

import collections
import statistics

from engines.replica import engine
from scheduler.contracts import clock

_KEPT = 32  # requests behind the median
_WINDOW_S = 2.0  # long enough to even out steps, short enough to be the newest


class Tempo:
    """Watches the taps of running requests.

    Args:
        time: the clock.
    """

    def __init__(self, time: clock.Clock) -> None:
        self._clock = time
        self._waiting: dict[int, tuple[engine.Tap, int]] = {}
        self._ttft_us: collections.deque[int] = collections.deque(maxlen=_KEPT)
        self._totals: collections.deque[tuple[float, int]] = collections.deque()

    def opened(self, tap: engine.Tap) -> None:
        """A request has its seat and enters the engine now."""
        self._waiting[id(tap)] = (tap, self._clock.wall_us())

    def closed(self, tap: engine.Tap) -> None:
        """The request has left."""
        self._look(self._waiting.pop(id(tap), None))

    def ttft_ms(self) -> float:
        """Return the median time to first token of the newest requests, 0 without any."""
        for key, (tap, _) in list(self._waiting.items()):
            if tap.first_token_us:
                self._look(self._waiting.pop(key))
        return round(statistics.median(self._ttft_us) / 1000, 3) if self._ttft_us else 0.0

    def tokens_per_s(self, total: int) -> float:
        """Return tokens sampled a second, given how many there were since the start."""
        now = self._clock.monotonic()
        self._totals.append((now, total))
        while len(self._totals) > 2 and self._totals[1][0] <= now - _WINDOW_S:
            self._totals.popleft()
        since, before = self._totals[0]
        return round(max(0, total - before) / (now - since), 1) if now > since else 0.0

    def _look(self, seen: tuple[engine.Tap, int] | None) -> None:
        if seen is not None and seen[0].first_token_us:
            self._ttft_us.append(max(0, seen[0].first_token_us - seen[1]))
