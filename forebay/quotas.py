"""Joins quotas to the registry, to the site's prices and to the ledger."""

from accounting import postings, rates, totals
from accounting import settings as accounting_settings
from forebay import installation
from scheduler.contracts import clock
from scheduler.runtime import loop, quota_check, quota_keeper, quota_routes
from scheduler.runtime import settings as scheduler_settings
from scheduler.runtime.registry import store


class Prices(rates.Pricing):
    """The state folder's rates; `refresh` takes in those that were added since."""

    def __init__(self, log: postings.Postings) -> None:
        super().__init__()
        self._log = log
        self._read = -1

    def refresh(self) -> None:
        """Read what is new; blocks for one look-up in the folder when there is nothing.

        Raises:
            postings.PostingsDamaged: the log is not as it was written; the last rates stay.
        """
        log = self._log.read()
        if len(log) != self._read:
            self.current, self._read = rates.read(log), len(log)


def keeper(
    here: installation.Installation, registry: store.Registry, time: clock.Clock
) -> quota_keeper.Keeper:
    """Return the keeper of the book for a process that admits; start it before the first request."""
    prices = Prices(postings.Postings(here.state))
    table = here.config.table(scheduler_settings.Settings)
    return quota_keeper.Keeper(
        registry.quotas,
        time,
        prices,
        refresh_prices=prices.refresh,
        refresh_s=table.quota_refresh_s,
        warn_percent=table.quota_warn_percent,
    )


def check(
    here: installation.Installation, registry: store.Registry, time: clock.Clock
) -> loop.Periodic:
    """Return the leader's comparison of counters and ledger."""
    books = here.config.table(accounting_settings.Accounting)
    prices = Prices(postings.Postings(here.state))
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
