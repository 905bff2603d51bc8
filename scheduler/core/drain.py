"""How fast a band's queue empties, and what that means for those who come now."""

import collections

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class DrainRate:
    """Departures of one band a second, counted only while somebody waits.

    Without that condition a quiet band would look slow, and refuse what it could serve at once.

    Args:
        window_s: how far back it looks.
        least: departures in the window that make the number worth believing.
    """

    def __init__(self, window_s: float = 10.0, least: int = 5) -> None:
        self._window_s = window_s
        self._least = least
        self._departures: collections.deque[float] = collections.deque(maxlen=1024)

    def departed(self, now: float, *, others_wait: bool) -> None:
        """Note that a request of the band was dispatched."""
        if others_wait:
            self._departures.append(now)

    def per_s(self, now: float) -> float | None:
        """Return the rate, or None where too little was seen."""
        while self._departures and self._departures[0] < now - self._window_s:
            self._departures.popleft()
        if len(self._departures) < self._least:
            return None
        # From the first departure to now: a band that has stalled since is getting slower.
        return len(self._departures) / max(now - self._departures[0], 0.001)


def retry_after_s(places: float, drain_per_s: float | None) -> float:
    """Return seconds until ``places`` have left at the measured rate, between 1 and 60."""
    return clamp(places / drain_per_s if drain_per_s else MIN_RETRY_S)


def clamp(seconds: float) -> float:
    """Return a Retry-After that is worth saying."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
