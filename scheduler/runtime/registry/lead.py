"""The lead: one row, one holder, an epoch that grows with each change of holder."""

import sqlalchemy as sa

from scheduler.runtime.registry import database, tables

NAME = "broker"


class Lead:
    """Takes, renews and gives up the lead. Whoever is late is fenced by the epoch, not by its clock."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def take(self, holder: str, now_us: int, ttl_us: int) -> int | None:
        """Take the lead if it is free or has run out; return the new epoch, or None."""
        with self._base.write() as session:
            query = sa.select(tables.Leadership).where(tables.Leadership.name == NAME)
            row = session.scalar(query.with_for_update())
            if row is None:
                session.add(
                    tables.Leadership(name=NAME, holder=holder, epoch=1, expires_us=now_us + ttl_us)
                )
                return 1
            if row.holder and row.holder != holder and row.expires_us > now_us:
                return None
            row.holder, row.epoch, row.expires_us = holder, row.epoch + 1, now_us + ttl_us
            return row.epoch

    def renew(self, epoch: int, now_us: int, ttl_us: int) -> None:
        """Keep the lead for ``ttl_us`` more; raises `database.Fenced` if it is another's."""
        with self._base.write(epoch) as session:
            session.execute(
                sa.update(tables.Leadership)
                .where(tables.Leadership.name == NAME, tables.Leadership.epoch == epoch)
                .values(expires_us=now_us + ttl_us)
            )

    def lift(self, epoch: int, over: int) -> None:
        """Make the next epoch come after ``over``: agents follow one of a registry that was lost."""
        with self._base.write(epoch) as session:
            row = session.get_one(tables.Leadership, NAME)
            row.epoch, row.expires_us, row.holder = max(over, row.epoch), 0, ""

    def release(self, epoch: int) -> None:
        """Give the lead up, so that a standby need not wait; nothing happens if it is another's."""
        with self._base.write() as session:
            session.execute(
                sa.update(tables.Leadership)
                .where(tables.Leadership.name == NAME, tables.Leadership.epoch == epoch)
                .values(expires_us=0, holder="")
            )

    def epoch(self) -> int:
        """Return the newest epoch, 0 before the first leader."""
        query = sa.select(tables.Leadership.epoch).where(tables.Leadership.name == NAME)
        with self._base.read() as session:
            return session.scalar(query) or 0

    def confirm(self, epoch: int) -> None:
        """Say that a leader still leads before it does what nobody can fence; raises `database.Fenced`."""
        newest = self.epoch()
        if newest != epoch:
            raise database.Fenced(
                f"epoch {epoch} is over, the newest is {newest}: another broker leads"
            )

    def begin_period(self, epoch: int, name: str, start_us: int) -> int | None:
        """Note that the leader begins a periodic job's period.

        Returns:
            The period to do: one that was left half done before ``start_us``, else ``start_us``, or
            None if that is done.
        """
        with self._base.write(epoch) as session:
            row = session.get(tables.Period, name)
            if row is None:
                row = tables.Period(name=name, begun_us=start_us, done_us=-1)
                session.add(row)
            elif row.done_us < row.begun_us < start_us:
                return row.begun_us
            elif row.done_us >= start_us:
                return None
            row.begun_us = start_us
            return start_us

    def end_period(self, epoch: int, name: str, start_us: int) -> None:
        """Note that a period's work is done."""
        with self._base.write(epoch) as session:
            row = session.get(tables.Period, name)
            if row is not None:
                row.done_us = max(row.done_us, start_us)
