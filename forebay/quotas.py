"""Joins quotas to the registry and to the ledger."""

from accounting import postings, totals
from accounting import settings as accounting_settings
from forebay import installation, quota_books
from scheduler.contracts import clock
from scheduler.runtime import loop, quota_check
from scheduler.runtime.registry import store


def check(
    here: installation.Installation, registry: store.Registry, time: clock.Clock
) -> loop.Periodic:
    """Return the leader's comparison of counters and ledger."""
    books = here.config.table(accounting_settings.Accounting)
    prices = quota_books.Prices(postings.Postings(here.state))
    ledger = totals.Totals(here.state, memory_mb=books.memory_mb)
    look = quota_check.periodic(
        registry.quotas, ledger, prices, time, refresh_prices=prices.refresh
    )
    return loop.Periodic("check quotas", quota_check.LOOK_S, look)
