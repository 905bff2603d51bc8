"""How fast a band's queue empties, and what that means for those who come now."""

import collections

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class DrainRate:
    """Departures of one band a second, counted only while somebody waits.

    Without that condition a quiet band would look slow, and refuse what it could serve at once. A band of
    long answers has few departures in any window, and a guess would make its callers ask each second: there
    the last few count, however long ago.

    Args:
        window_s: how far back it looks where there are many.
        least: departures that are kept where fewer are in the window.
        forget_s: departures are not believed for longer.
    """

    def __init__(self, window_s: float = 10.0, least: int = 5, forget_s: float = 600.0) -> None:
        self._window_s = window_s
        self._least = least
        self._forget_s = forget_s
        self._departures: collections.deque[float] = collections.deque(maxlen=1024)

    def departed(self, now: float, *, others_wait: bool) -> None:
        """Note that a request of the band was dispatched."""
        if others_wait:
            self._departures.append(now)
        else:
            self._departures.clear()  # what follows is another crowd, and nobody waits until it comes

    def per_s(self, now: float) -> float | None:
        """Return the rate, or None where too little was seen."""
        seen = self._departures
        while seen and (
            seen[0] < now - self._forget_s
            or (len(seen) > self._least and seen[0] < now - self._window_s)
        ):
            seen.popleft()
        if len(seen) < 2 or (len(seen) < self._least and now - seen[0] < self._window_s):
            return None
        # To now as well: a band that has stalled since its last departure is getting slower.
        between = (len(seen) - 1) / max(seen[-1] - seen[0], 0.001)
        return min(between, len(seen) / max(now - seen[0], 0.001))


def retry_after_s(places: float, drain_per_s: float | None) -> float:
    """Return seconds until ``places`` have left at the measured rate, between 1 and 60."""
    return clamp(places / drain_per_s if drain_per_s else MIN_RETRY_S)


def clamp(seconds: float) -> float:
    """Return a Retry-After that is worth saying."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
