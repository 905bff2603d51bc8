"""What the ledger teaches of tomorrow: curves by weekday and time of day, kept up by the leader.

The first look reads all the days that count, later ones only what is new or may still have changed. Reading
and learning block and run in a thread; the planner takes finished curves.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import ports
from scheduler.core import forecast, history

LATE_US = 3_600_000_000  # an hour is looked at again, for rows that came later than others
ROLLED_US = 300_000_000  # rows are shipped and rolled up within a few minutes
_MONDAY = datetime.datetime(1970, 1, 5)
_SHOWN_H = 24


def local_s(at_us: int, zone: datetime.tzinfo) -> float:
    """Return UTC µs as seconds of ``zone``'s wall clock since Monday, 5 January 1970."""
    moment = datetime.datetime.fromtimestamp(at_us / 1_000_000, zone)
    return (moment.replace(tzinfo=None) - _MONDAY).total_seconds()


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """What one look at the ledger leaves for the planner and for `fctl show forecast`.

    Attributes:
        curves: of requests/s, by model.
        held_s: seconds that a request of the model stays, over all that is known.
        at_us: until when it knows the past, UTC µs; 0: nothing was read yet.
        holes: quarters of an hour that were left out: the site was down, or it was a holiday.
        error: why the newest look failed, or "".
    """

    curves: Mapping[str, forecast.Curve] = dataclasses.field(default_factory=dict)
    held_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    at_us: int = 0
    holes: int = 0
    error: str = ""


class Forecasts:
    """Keeps the past that counts in memory, and learns from it.

    Args:
        ledger: what arrived.
        zone: whose wall clock the days of callers follow.
        days: so many are learned from.
    """

    def __init__(self, ledger: ports.DemandLedger, zone: datetime.tzinfo, days: int) -> None:
        self._ledger = ledger
        self.zone = zone
        self._length_us = days * round(forecast.DAY_S) * 1_000_000
        self._past: dict[str, dict[int, ports.Arrived]] = {}
        self._read_us = 0
        self.learned = Learned()

    def refresh(self, now_us: int) -> Learned:
        """Take up what is new in the ledger and learn; blocks, and never beside itself."""
        last_us = (now_us - ROLLED_US) // history.QUARTER_US * history.QUARTER_US
        first_us = last_us - self._length_us
        since_us = max(first_us, self._read_us - LATE_US)
        try:
            fresh = self._ledger.quarters(since_us, last_us)
        except OSError as error:
            self.learned = dataclasses.replace(self.learned, error=str(error))
            return self.learned
        self._keep(fresh, first_us, since_us, last_us)
        self._read_us = last_us
        self.learned = self._learn(first_us, last_us)
        return self.learned

    def _keep(
        self,
        fresh: Mapping[str, Mapping[int, ports.Arrived]],
        first_us: int,
        since_us: int,
        last_us: int,
    ) -> None:
        for model in self._past.keys() | fresh.keys():
            kept = {
                at_us: arrived
                for at_us, arrived in self._past.get(model, {}).items()
                if first_us <= at_us < since_us
            }
            # A quarter that still goes on would teach half of what it brings.
            kept |= {at: arrived for at, arrived in fresh.get(model, {}).items() if at < last_us}
            self._past[model] = kept
        self._past = {model: kept for model, kept in self._past.items() if kept}

    def _learn(self, first_us: int, last_us: int) -> Learned:
        totals: dict[int, float] = {}
        for kept in self._past.values():
            for at_us, arrived in kept.items():
                totals[at_us] = totals.get(at_us, 0.0) + arrived.requests

        def here(at_us: int) -> float:
            return local_s(at_us, self.zone)

        holes = history.holes(totals, first_us, last_us, here)
        curves: dict[str, forecast.Curve] = {}
        held: dict[str, float] = {}
        for model, kept in self._past.items():
            counts = {at_us: arrived.requests for at_us, arrived in kept.items()}
            curves[model] = forecast.learn(history.samples(counts, first_us, last_us, here, holes))
            told = [arrived for arrived in kept.values() if arrived.held_s > 0]
            requests = sum(arrived.requests for arrived in told)
            if requests:
                held[model] = sum(each.requests * each.held_s for each in told) / requests
        return Learned(curves, held, last_us, len(holes))


def told(learned: Learned, zone: datetime.tzinfo, now_us: int, days: int) -> dict[str, Any]:
    """Return what `fctl show forecast` shows: each model's next day, by the hour."""
    models = []
    for model, curve in sorted(learned.curves.items()):
        hours = []
        for hour in range(_SHOWN_H + 1):
            at_us = now_us + hour * 3_600_000_000
            guess = curve.at(local_s(at_us, zone))
            if guess is not None:
                hours.append({"at_us": at_us, **_guess(guess)})
        models.append(
            {
                "model": model,
                "days": curve.days,
                "held_s": round(learned.held_s.get(model, 0.0), 3),
                "hours": hours,
            }
        )
    return {
        "models": models,
        "learned_us": learned.at_us,
        "holes": learned.holes,
        "error": learned.error,
        "zone": str(zone),
        "looks_at_days": days,
    }


def _guess(guess: forecast.Guess) -> dict[str, Any]:
    return {
        "mean": round(guess.mean, 4),
        "upper": round(guess.upper, 4),
        "sure": round(guess.sure, 3),
        "counts": guess.sure >= forecast.TRUSTED,
    }
