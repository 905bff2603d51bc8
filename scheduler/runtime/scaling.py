"""The autoscaler's bounds of a model, as `[models.scaling]` and the registry have them; measured starts."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.core import autoscale, escalation, startup, targets

STARTS_KEPT = 8
_MEASURED = {"share", "start_s", "wake_s"}
NAMES = tuple(
    field.name for field in dataclasses.fields(autoscale.Scaling) if field.name not in _MEASURED
)
_WHO = ("", "interactive_", "standard_", "batch_")  # all callers, and tier by tier
_BOUNDS = ("floor", "minimum", "maximum")
_WHOLE = {f"{who}{bound}" for who in _WHO for bound in _BOUNDS}


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
    for who in _WHO:
        most = getattr(found, f"{who}maximum")
        for bound in ("floor", "minimum"):
            least = getattr(found, f"{who}{bound}")
            if most and least > most:
                raise ValueError(f"scaling.{who}{bound} {least} exceeds {who}maximum {most}")
    for bound in ("floor", "minimum"):
        tiers = [getattr(found, f"{who}_{bound}") for who in ("interactive", "standard")]
        if found.maximum and sum(tiers) > found.maximum:
            raise ValueError(
                f"scaling.interactive_{bound} {tiers[0]} and standard_{bound} {tiers[1]} together exceed "
                f"maximum {found.maximum}"
            )
    return found


Key = tuple[str, str]
_Kept = dict[Key, "collections.deque[Mapping[str, float]]"]


class Starts:
    """How long replicas took lately from the ask to serving, by model and version and by phase; seconds.

    A start takes all of its phases: a lease that waits in Slurm's queue makes it longer as much as weights
    that take long to load.
    """

    def __init__(self) -> None:
        self._cold: _Kept = {}
        self._woken: _Kept = {}

    def note(self, key: Key, phases: Mapping[str, float], *, woken: bool) -> None:
        """Note a start by its phases (`core.startup`); ``woken``: out of a parked process."""
        kept = self._woken if woken else self._cold
        kept.setdefault(key, collections.deque(maxlen=STARTS_KEPT)).append(phases)

    def told(self) -> dict[str, dict[str, Any]]:
        """Return all that is kept, for the registry, and the medians, for people."""
        return {
            f"{model} {version}": {
                "model": model,
                "version": version,
                "cold": [dict(phases) for phases in self._cold.get((model, version), ())],
                "woken": [dict(phases) for phases in self._woken.get((model, version), ())],
                "start_s": _median(self._cold.get((model, version))),
                "wake_s": _median(self._woken.get((model, version))),
                "phases_s": _by_phase(self._cold.get((model, version), ())),
            }
            for model, version in sorted(self._cold.keys() | self._woken.keys())
        }

    def restore(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up what a leader before has kept."""
        for kept in told.values():
            key = (str(kept["model"]), str(kept["version"]))
            for name, into in (("cold", self._cold), ("woken", self._woken)):
                if kept[name]:
                    into[key] = collections.deque(kept[name], maxlen=STARTS_KEPT)

    def keep(self, keys: frozenset[Key]) -> None:
        """Forget what is not deployed any more."""
        for kept in (self._cold, self._woken):
            for key in kept.keys() - keys:
                del kept[key]

    def cold(self) -> Mapping[tuple[str, str], float]:
        """Return the median start of each deployment that has had one, parked ones not counted."""
        return {key: _median(times) for key, times in self._cold.items()}

    def budget_s(self, key: Key, *, woken: bool) -> float:
        """Return the seconds in which a start should be over, by those before it (`core.escalation`).

        The time in Slurm's queue is none of it: a replica is ordered in a lease that is there.

        Args:
            key: model and version.
            woken: out of a parked process.
        """
        kept = (self._woken if woken else self._cold).get(key, ())
        took = [sum(phases.values()) - phases.get("queue", 0.0) for phases in kept]
        return escalation.budget_s(took, targets.UNKNOWN_START_S)

    def applied(self, key: tuple[str, str], bounds: autoscale.Scaling) -> autoscale.Scaling:
        """Return ``bounds`` with what was measured: the medians, 0 where nothing was."""
        return dataclasses.replace(
            bounds, start_s=_median(self._cold.get(key)), wake_s=_median(self._woken.get(key))
        )


def _median(starts: "collections.deque[Mapping[str, float]] | None") -> float:
    return statistics.median(sum(phases.values()) for phases in starts) if starts else 0.0


def _by_phase(starts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    known = list(starts)
    return {
        name: round(statistics.median(phases.get(name, 0.0) for phases in known), 3)
        for name in startup.PHASES
        if any(name in phases for phases in known)
    }
