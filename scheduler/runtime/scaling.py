"""The autoscaler's bounds of a model, as `[models.scaling]` and the registry have them; measured starts."""

import collections
import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from scheduler.core import autoscale

STARTS_KEPT = 8
_MEASURED = {"share", "start_s", "wake_s"}
NAMES = tuple(
    field.name for field in dataclasses.fields(autoscale.Scaling) if field.name not in _MEASURED
)
_WHOLE = {"floor", "minimum", "maximum", "batch_floor", "batch_maximum"}


def from_mapping(given: Mapping[str, Any]) -> autoscale.Scaling:
    """Return bounds from their names and numbers.

    Raises:
        ValueError: a name is unknown, a number is none, negative or not whole where it must be, or the
            bounds contradict each other.
    """
    for name, value in given.items():
        if name not in NAMES:
            raise ValueError(f"scaling.{name} is unknown: one of {', '.join(NAMES)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value < 0 or (name in _WHOLE and value != int(value)):
            kind = "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"scaling.{name} = {value!r}: must be {kind} from 0")
    found = autoscale.Scaling(**given)
    most = found.maximum
    for name in ("floor", "minimum"):
        if most and getattr(found, name) > most:
            raise ValueError(f"scaling.{name} {getattr(found, name)} exceeds maximum {most}")
    if found.batch_maximum and found.batch_floor > found.batch_maximum:
        raise ValueError(
            f"scaling.batch_floor {found.batch_floor} exceeds batch_maximum {found.batch_maximum}"
        )
    return found


class Starts:
    """How long replicas took lately from their order to serving, by model and version; seconds."""

    def __init__(self) -> None:
        self._cold: dict[tuple[str, str], collections.deque[float]] = {}
        self._woken: dict[tuple[str, str], collections.deque[float]] = {}

    def note(self, key: tuple[str, str], seconds: float, *, woken: bool) -> None:
        """Note a start; ``woken``: out of a parked process."""
        kept = self._woken if woken else self._cold
        kept.setdefault(key, collections.deque(maxlen=STARTS_KEPT)).append(seconds)

    def cold(self) -> Mapping[tuple[str, str], float]:
        """Return the median start of each deployment that has had one, parked ones not counted."""
        return {key: _median(times) for key, times in self._cold.items()}

    def applied(self, key: tuple[str, str], bounds: autoscale.Scaling) -> autoscale.Scaling:
        """Return ``bounds`` with what was measured: the medians, 0 where nothing was."""
        return dataclasses.replace(
            bounds, start_s=_median(self._cold.get(key)), wake_s=_median(self._woken.get(key))
        )


def _median(times: "collections.deque[float] | None") -> float:
    return statistics.median(times) if times else 0.0
