"""Joins the book of quotas to the registry and to the site's prices, for whoever owns queues."""

from accounting import postings, rates
from forebay import installation
from scheduler.contracts import clock
from scheduler.runtime import quota_keeper
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
