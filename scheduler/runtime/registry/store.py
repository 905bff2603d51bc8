"""The registry: one database, and one object for each thing that it keeps.

Every method is one short transaction and blocks; callers on an event loop use `asyncio.to_thread`.
"""

from scheduler.runtime.registry import (
    catalog,
    cordons,
    database,
    declared,
    holdings,
    journal,
    keys,
    lead,
    quotas,
    retention,
    rollouts,
    timetable,
    wishes,
)


class Registry:
    """What survives a restart.

    Attributes:
        catalog: models, versions, routes, deployments, as the broker runs them.
        declared: what is declared of them, with its history.
        holdings: leases, slots, replicas.
        rollouts: versions on their way.
        cordons: nodes that are kept off.
        keys: API keys.
        lead: who leads.
        journal: plans, events, facts.
        quotas: limits and counters.
        timetable: schedules.
        retention: forgets what is long over.
        wishes: what admins want for now of batch, leases, nodes and replicas.
    """

    def __init__(self, base: database.Database) -> None:
        self.database = base
        self.catalog = catalog.Catalog(base)
        self.declared = declared.Catalogue(base)
        self.rollouts = rollouts.Rollouts(base)
        self.holdings = holdings.Holdings(base)
        self.cordons = cordons.Cordons(base)
        self.keys = keys.Keys(base)
        self.lead = lead.Lead(base)
        self.journal = journal.Journal(base)
        self.quotas = quotas.Quotas(base)
        self.timetable = timetable.Timetable(base)
        self.retention = retention.Retention(base)
        self.wishes = wishes.Wishes(base)

    @classmethod
    def open(cls, url: str, *, migrate: bool = True) -> "Registry":
        """Open the registry at a SQLAlchemy URL; bring its schema up to date unless told not to."""
        base = database.Database(url)
        if migrate:
            base.upgrade()
        return cls(base)

    def close(self) -> None:
        """Close every connection."""
        self.database.close()
