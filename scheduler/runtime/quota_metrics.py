"""What Prometheus may ask of quotas: teams' shares, notices, and drift from the ledger.

Only teams have series: users and keys may be thousands, and `fctl quota show` has them.
"""

from collections.abc import Iterator

from prometheus_client import core, registry

from scheduler.contracts import clock
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits
from scheduler.runtime import quota_keeper

_LABELS = ("team", "model", "tier", "kind")


class Collector(registry.Collector):
    """Reads a keeper's book whenever it is scraped."""

    def __init__(self, keeper: quota_keeper.Keeper, time: clock.Clock) -> None:
        self._keeper = keeper
        self._time = time

    def collect(self) -> Iterator[core.Metric]:
        """Yield the metrics."""
        now_us = self._time.wall_us()
        share = core.GaugeMetricFamily(
            "forebay_quota_used_ratio",
            "Used and reserved part of a team's quota, 1 is all of it.",
            labels=_LABELS,
        )
        for key, (used, amount) in self._keeper.book.standing(now_us).items():
            if key.scope is limits.Scope.TEAM:
                share.add_metric(_values(key), used / amount if amount else 1.0)
        yield share
        notices = core.CounterMetricFamily(
            "forebay_quota_notices",
            "Counters that came to their warning, passed a soft limit, or began to refuse.",
            labels=("level",),
        )
        for level in books.Level:
            notices.add_metric((level.value,), self._keeper.told[level])
        yield notices
        drift = core.GaugeMetricFamily(
            "forebay_quota_drift",
            "What the last check that found a difference had to add to a team's counter.",
            labels=_LABELS,
        )
        for (key, start_us), amount in self._keeper.drifts.items():
            now = start_us == limits.window(key.kind.period, now_us)[0]
            if now and key.scope is limits.Scope.TEAM:
                drift.add_metric(_values(key), amount)
        yield drift


def _values(key: limits.Key) -> tuple[str, ...]:
    return key.team, key.model, key.tier, key.kind.value
