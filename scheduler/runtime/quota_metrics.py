"""What Prometheus may ask of quotas: teams' shares, notices, and drift from the ledger.

Only teams have series: users and keys may be thousands, and `fctl quota show` has them. The numbers are set
after each exchange with the registry, so they work where several processes share one scrape.
"""

import prometheus_client

from scheduler.core import quota as books
from scheduler.core import quota_limits as limits

_LABELS = ("team", "model", "tier", "kind")
_Labels = tuple[str, str, str, str]


class Numbers:
    """The numbers of one owner; `registry` is what a scrape collects from."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._share = prometheus_client.Gauge(
            "forebay_quota_used_ratio",
            "Used and reserved part of a team's quota, 1 is all of it.",
            _LABELS,
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        self._drift = prometheus_client.Gauge(
            "forebay_quota_drift",
            "What the last check that found a difference had to add to a team's counter.",
            _LABELS,
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        notices = prometheus_client.Counter(
            "forebay_quota_notices",
            "Counters that came to their warning, passed a soft limit, or began to refuse.",
            ("level",),
            registry=self.registry,
        )
        self._notices = {level: notices.labels(level.value) for level in books.Level}
        self._shown: set[_Labels] = set()

    def notice(self, level: books.Level) -> None:
        """Count a notice."""
        self._notices[level].inc()

    def drift(self, key: limits.Key, amount: int) -> None:
        """Show what the ledger has corrected."""
        if key.scope is limits.Scope.TEAM:
            self._drift.labels(*_values(key)).set(amount)

    def show(self, book: books.Book, now_us: int) -> None:
        """Show how much of each quota is used; one that is no more shows 0."""
        gone, self._shown = self._shown, set()
        for key, (used, amount) in book.standing(now_us).items():
            if key.scope is limits.Scope.TEAM:
                values = _values(key)
                self._share.labels(*values).set(used / amount if amount else 1.0)
                self._shown.add(values)
        for values in gone - self._shown:
            self._share.labels(*values).set(0)


def _values(key: limits.Key) -> _Labels:
    return key.team, key.model, key.tier, key.kind.value
