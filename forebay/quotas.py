"""Joins quotas to the registry, to the ledger and to the routes that show them."""

from accounting import postings, totals
from accounting import settings as accounting_settings
from forebay import installation, quota_books
from scheduler.contracts import clock
from scheduler.runtime import loop, quota_check, quota_routes
from scheduler.runtime import settings as scheduler_settings
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


def routes(
    here: installation.Installation,
    registry: store.Registry,
    associations: quota_routes.Associations,
    time: clock.Clock,
) -> quota_routes.Site:
    """Return what /admin/quotas knows of the site."""
    table = here.config.table(scheduler_settings.Settings)
    teams = {*table.user_teams.values(), table.lease_team}
    return quota_routes.Site(
        registry, time, associations, frozenset(teams), table.quota_warn_percent
    )
