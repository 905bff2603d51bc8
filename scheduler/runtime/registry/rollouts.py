"""Rollouts in the registry: the newest of each model. Their steps move the route by revisions."""

import sqlalchemy as sa

from scheduler.runtime.registry import database, tables

OVER = "over"


class Rollouts:
    """Reads of rollouts."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def under_way(self, model: str) -> str:
        """Return the version that is being rolled out, "" without any."""
        query = sa.select(tables.Rollout).where(
            tables.Rollout.model == model, tables.Rollout.state != OVER
        )
        with self._base.read() as session:
            row = session.scalar(query)
            return "" if row is None else str(row.body["version"])
