"""How long to wait after something failed: pauses that double, and when to stop trying."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Failures:
    """Failures in a row.

    Attributes:
        count: how many.
        until: monotonic seconds before which nothing is tried again.
        reason: the newest failure's, one line.
    """

    count: int = 0
    until: float = 0.0
    reason: str = ""

    def waits(self, now: float) -> bool:
        """Return whether the pause still holds."""
        return now < self.until


def failed(before: Failures, now: float, reason: str, *, first_s: float, most_s: float) -> Failures:
    """Count one failure more; the pause is ``first_s``, twice that, … at most ``most_s`` seconds."""
    count = before.count + 1
    pause = min(most_s, first_s * 2 ** min(count - 1, 30))
    return Failures(count=count, until=now + pause, reason=reason)
