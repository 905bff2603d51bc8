"""What a model's demand will be, from the same time of earlier days: pure, and it says how sure it is.

A week is cut into slots of fifteen minutes of local time, so that daylight saving moves nothing. A guess
takes the same weekday first, then days of the same kind (working days, weekends), then any day. It only ever
asks for more, never for less than a floor, and what today shows beats it upwards.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

SLOT_S = 900
DAY_S = 86_400
WEEK_S = 7 * DAY_S
SLOTS = DAY_S // SLOT_S
UPPER = 1.28  # standard deviations above the mean: nine days of ten stay below
FEW = 0.15  # added per missing day, as a share of the mean: one day's curve proves little
TRUSTED = 0.3  # guesses less sure than that are not acted on
ENOUGH = 4  # days from which a group of days is better than a larger, mixed one is not needed


@dataclasses.dataclass(frozen=True, slots=True)
class Guess:
    """A rate in requests/s: expected, an upper bound, and how sure it is in [0, 1]."""

    mean: float
    upper: float
    sure: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, value: float) -> "_Sum":
        return _Sum(self.count + 1, self.total + value, self.squares + value * value)


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """What was learned of one model: (group, slot of the day) to its sums; see `learn`."""

    sums: Mapping[tuple[str, int], _Sum]
    days: int

    def at(self, week_s: float) -> Guess | None:
        """Return the guess for a second of the local week (Monday 00:00 is 0), None without history."""
        slot, part = divmod(week_s % WEEK_S, SLOT_S)
        first = self._slot(int(slot))
        second = self._slot((int(slot) + 1) % (7 * SLOTS))
        if first is None or second is None:
            return first or second
        share = part / SLOT_S
        return Guess(
            first.mean + (second.mean - first.mean) * share,
            first.upper + (second.upper - first.upper) * share,
            min(first.sure, second.sure),
        )

    def ahead(self, week_s: float, horizon_s: float) -> Guess | None:
        """Return the highest guess from now to ``horizon_s`` seconds ahead."""
        steps = max(1, math.ceil(horizon_s / SLOT_S))
        found = [self.at(week_s + horizon_s * step / steps) for step in range(steps + 1)]
        known = [guess for guess in found if guess is not None]
        return max(known, key=lambda guess: guess.upper) if known else None

    def _slot(self, slot: int) -> Guess | None:
        day, of_day = divmod(slot, SLOTS)
        for group, least in ((str(day), 2), (_kind(day), 2), ("any", 1)):
            sums = self.sums.get((group, of_day))
            if sums is None or sums.count < least:
                continue
            mean = sums.total / sums.count
            spread = math.sqrt(max(0.0, sums.squares / sums.count - mean * mean))
            missing = max(0, ENOUGH - sums.count)
            upper = mean + UPPER * spread + FEW * missing * mean
            varies = spread / mean if mean > 0 else 0.0
            return Guess(mean, upper, sums.count / (sums.count + 1) / (1 + varies))
        return None


def learn(samples: Iterable[tuple[float, float]]) -> Curve:
    """Learn from (second since a local Monday 00:00, mean requests/s of that slot); two weeks are enough."""
    sums: dict[tuple[str, int], _Sum] = {}
    days: set[int] = set()
    for at_s, rate in samples:
        days.add(int(at_s // DAY_S))
        slot = int(at_s % WEEK_S // SLOT_S)
        day, of_day = divmod(slot, SLOTS)
        for group in (str(day), _kind(day), "any"):
            key = (group, of_day)
            sums[key] = sums.get(key, _Sum()).plus(rate)
    return Curve(sums, len(days))


def slot_of(at_s: float) -> tuple[bool, int]:
    """Return whether a second since a local Monday 00:00 is of a weekend, and its slot of the day."""
    day, of_day = divmod(int(at_s % WEEK_S // SLOT_S), SLOTS)
    return _kind(day) == "weekend", of_day


def _kind(day: int) -> str:
    return "weekend" if day >= 5 else "working"
