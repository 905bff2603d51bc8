"""How long an engine was at work and on how many tokens: counters that only grow.

Busy is the time in which the engine made steps, from the moment work reached an engine that had none
(its first step has no earlier one to be measured from) to the end of the last step. It is wall time by a
monotonic clock and not a sum over sequences: ten sequences in one step are busy once.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What an engine has done since it started.

    Attributes:
        busy_us: µs in which it made steps.
        prefill_tokens: prompt tokens computed, those taken from a cache left out.
        decode_tokens: tokens sampled.
        steps: steps made.
    """

    busy_us: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


class Meter:
    """Counts an engine's work. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._since: float | None = None
        self._prefill = 0
        self._decode = 0
        self._steps = 0

    def begin(self, now: float) -> None:
        """Note that there is work from now on, if there was none."""
        if self._since is None:
            self._since = now

    def step(self, now: float, *, prefill: int, decode: int, more: bool) -> None:
        """Count a step that has just ended.

        Args:
            now: when.
            prefill: prompt tokens that it computed.
            decode: tokens that it sampled.
            more: whether work is left, so that the next step has begun.
        """
        if self._since is not None:
            self._busy_s += max(0.0, now - self._since)
        self._since = now if more else None
        self._steps += 1
        self._prefill += prefill
        self._decode += decode

    def rest(self, now: float) -> None:
        """Note that no work is left, ended or not."""
        if self._since is not None:
            self._busy_s += max(0.0, now - self._since)
            self._since = None

    def read(self, now: float) -> Work:
        """Return the work up to now, that of a step under way included."""
        running = 0.0 if self._since is None else max(0.0, now - self._since)
        busy_us = round((self._busy_s + running) * 1_000_000)
        return Work(busy_us, self._prefill, self._decode, self._steps)
