"""Counters for Prometheus out of the ledger: what each team used, by model, for ever growing.

The gateways' own metrics count what they see, without teams, and begin at zero with each process; these are
the ledger's, so that a dashboard and the bill show the same. Whole days come from the rollups and the rest
from the rows. A count never goes back (Prometheus would take that for a restart and count all of it
again): where a late row turned a team's tokens into the platform's, the counter waits until it has caught up.
"""

import threading
from pathlib import Path

import duckdb
import prometheus_client
from prometheus_client import core, registry

from accounting import books, quantities, rates, rollup, settings
from scheduler.contracts import clock

PATH_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEPT_S = 30.0  # between two looks into the books, however often it is scraped

_Key = tuple[str, str, str]


class UsageCounters(registry.Collector):
    """``forebay_usage_tokens_total{team,model,kind}``; `text` blocks, so call it in a thread.

    Args:
        state_dir: Forebay's state folder.
        table: the settings.
        time: for how old the figures are.
    """

    def __init__(self, state_dir: Path, table: settings.Accounting, time: clock.Clock) -> None:
        self._books = books.Books(state_dir, memory_mb=table.memory_mb)
        self._time = time
        self._lock = threading.Lock()
        self._counts: dict[_Key, int] = {}
        self._looked: float | None = None
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def text(self) -> str:
        """Return the counters in Prometheus's text format.

        Raises:
            manifest.ManifestDamaged: the books can't be read.
        """
        # While another scrape looks, the figures of the last look are told: threads must not pile up here.
        if self._lock.acquire(blocking=self._looked is None):
            try:
                now = self._time.monotonic()
                if self._looked is None or now - self._looked >= KEPT_S:
                    self._look()
                    self._looked = now
            finally:
                self._lock.release()
        return prometheus_client.generate_latest(self._registry).decode()

    def collect(self) -> list[core.Metric]:
        """Return the counters as they were found last."""
        family = core.CounterMetricFamily(
            "forebay_usage_tokens",
            "Tokens that teams pay for, as the ledger counts them.",
            labels=("team", "model", "kind"),
        )
        for key, count in sorted(self._counts.items()):
            family.add_metric(key, count)
        return [family]

    def _look(self) -> None:
        try:
            found = self._found(quantities.rolled_until(self._books.state_dir))
        except (FileNotFoundError, rollup.Busy, duckdb.Error):
            found = self._found(0)
        before = self._counts
        self._counts = {
            key: max(found.get(key, 0), before.get(key, 0)) for key in {*found, *before}
        }

    def _found(self, rolled_us: int) -> dict[_Key, int]:
        counts: dict[_Key, int] = {}
        with self._books.reading(rolled_us) as reading:
            cuts = [0, books.MAX_US]
            told = "team", "model"
            for each in quantities.take(
                reading, cuts, rates.Rates(), None, rolled_us, told
            ).amounts:
                _, team, _, model, _, _ = each.owner
                key = team, model, each.use.value
                counts[key] = counts.get(key, 0) + each.amount
        return counts
