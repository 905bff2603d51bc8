"""What copies of requests have told of a shadow version: both answers to each, side by side. Pure.

A copied request is a pair by itself, so the test of rollouts (`trials`) says here too in what the shadow is
worse; that judges nothing, it is told to people.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.contracts import fleet, observed
from scheduler.core import trials


@dataclasses.dataclass
class _Side:
    """Sums of one side's answers; times are sums of ms over those that have one."""

    failed: int = 0
    tokens: int = 0
    ttft_ms: float = 0.0
    firsts: int = 0
    total_ms: float = 0.0
    timed: int = 0
    whole: int = 0

    def add(self, fared: observed.Fared) -> None:
        self.failed += fared.failed
        if fared.ttft_ms:
            self.ttft_ms += fared.ttft_ms
            self.firsts += 1
        if not fared.failed:
            self.whole += 1
            self.total_ms += fared.total_ms
            self.timed += bool(fared.total_ms)
            self.tokens += fared.tokens

    def told(self) -> dict[str, Any]:
        return {
            "failed": self.failed,
            "ttft_ms": round(self.ttft_ms / self.firsts, 2) if self.firsts else 0.0,
            "total_ms": round(self.total_ms / self.timed, 2) if self.timed else 0.0,
            "tokens": round(self.tokens / self.whole, 2) if self.whole else 0.0,
        }


class _Found:
    """All that is known of one shadow version."""

    def __init__(self, shadow: str) -> None:
        self.copies = 0
        self.caller, self.shadow = _Side(), _Side()
        self.matches: collections.Counter[observed.Match] = collections.Counter()
        self.dropped: collections.Counter[str] = collections.Counter()
        self._name = shadow
        self._test = trials.Comparison(shadow)

    def note(self, one: observed.Copied) -> None:
        self.copies += 1
        self.caller.add(one.caller)
        self.shadow.add(one.copy)
        self.matches[one.match] += 1
        # One after the other: the test pairs a trial with the newest one of the other version.
        self._test.note([_trial(one.model, "", one.caller)])
        self._test.note([_trial(one.model, self._name, one.copy)])

    def told(self) -> dict[str, Any]:
        return {
            "copies": self.copies,
            "dropped": dict(sorted(self.dropped.items())),
            "same": self.matches[observed.Match.SAME],
            "differs": self.matches[observed.Match.DIFFERS],
            "caller": self.caller.told(),
            "copy": self.shadow.told(),
            "worse": self._test.verdict,
        }


class Shadows:
    """What is known of every shadow version that a route names, since it was named."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Found] = {}

    def note(
        self,
        routes: Mapping[str, fleet.Route],
        copies: Iterable[observed.Copied],
        dropped: Iterable[observed.CopiesDropped] = (),
    ) -> None:
        """Take what a gateway tells, but of shadows that no route names any more: they would count again."""
        named = _named(routes)
        for one in copies:
            if (one.model, one.shadow) in named:
                self._of(one.model, one.shadow).note(one)
        for lost in dropped:
            if (lost.model, lost.shadow) in named:
                self._of(lost.model, lost.shadow).dropped[lost.reason] += lost.count

    def keep(self, routes: Mapping[str, fleet.Route]) -> None:
        """Forget what no route has as its shadow any more."""
        named = _named(routes)
        self._found = {key: found for key, found in self._found.items() if key in named}

    def told(self, routes: Mapping[str, fleet.Route]) -> list[dict[str, Any]]:
        """Return what is known, one for each route with a shadow; times and tokens are means."""
        return [
            {
                "model": route.model,
                "version": route.shadow,
                "percent": route.shadow_percent,
                **self._of(route.model, route.shadow).told(),
            }
            for _, route in sorted(routes.items())
            if route.shadow
        ]

    def _of(self, model: str, shadow: str) -> _Found:
        return self._found.setdefault((model, shadow), _Found(shadow))


def _named(routes: Mapping[str, fleet.Route]) -> set[tuple[str, str]]:
    return {(route.model, route.shadow) for route in routes.values() if route.shadow}


def _trial(model: str, version: str, fared: observed.Fared) -> observed.Trial:
    return observed.Trial(model, version, fared.failed, fared.ttft_ms, fared.itl_ms)
