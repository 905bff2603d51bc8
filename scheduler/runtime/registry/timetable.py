"""Schedules in the registry, and what of them began."""

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors
from scheduler.runtime import schedules
from scheduler.runtime.registry import database, tables

MOST = 1000  # schedules; each is looked at every second
KEPT = 1000  # beginnings of each: years of mornings


class Timetable:
    """Reads and writes of schedules."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def all(self) -> tuple[schedules.Schedule, ...]:
        """Return every schedule by name."""
        with self._base.read() as session:
            rows = session.scalars(sa.select(tables.Schedule).order_by(tables.Schedule.name))
            return tuple(_schedule(row) for row in rows)

    def get(self, name: str) -> schedules.Schedule:
        """Return one; raises `errors.NotFound`."""
        with self._base.read() as session:
            row = session.get(tables.Schedule, name)
            if row is None:
                raise _unknown(name)
            return _schedule(row)

    def add(self, schedule: schedules.Schedule, author: str, reason: str, now_us: int) -> None:
        """Keep a new one; raises `errors.BadRequest` if the name is taken, the model unknown or all full."""
        with self._base.write() as session:
            if session.get(tables.Schedule, schedule.name) is not None:
                raise errors.BadRequest(
                    f"schedule {schedule.name}: there is one; `fctl schedule rm {schedule.name}` first",
                    param="name",
                )
            if session.get(tables.Model, schedule.model) is None:
                raise errors.ModelNotFound(
                    f"{schedule.model}: not deployed here; `fctl show models` lists what is"
                )
            count = session.scalar(sa.select(sa.func.count()).select_from(tables.Schedule)) or 0
            if count >= MOST:
                raise errors.BadRequest(f"{count} schedules: that is the most", param="name")
            session.add(
                tables.Schedule(
                    name=schedule.name,
                    model=schedule.model,
                    floor=schedule.floor,
                    cron=schedule.cron,
                    until=schedule.until,
                    zone=schedule.zone,
                    paused=schedule.paused,
                    author=author,
                    reason=reason,
                    created_us=now_us,
                    since_us=now_us,
                )
            )

    def pause(self, name: str, paused: bool, now_us: int) -> None:
        """Pause one, or let it go on: what began meanwhile did not; raises `errors.NotFound`."""
        with self._base.write() as session:
            row = session.get(tables.Schedule, name)
            if row is None:
                raise _unknown(name)
            row.paused = paused
            row.since_us = max(row.since_us, now_us)

    def remove(self, name: str) -> None:
        """Forget one; raises `errors.NotFound`."""
        with self._base.write() as session:
            row = session.get(tables.Schedule, name)
            if row is None:
                raise _unknown(name)
            session.delete(row)
            session.execute(sa.delete(tables.Firing).where(tables.Firing.schedule == name))

    def note(self, epoch: int, began: Sequence[schedules.Firing]) -> tuple[schedules.Firing, ...]:
        """Keep what began, once each, and the mark up to which its schedule has been looked at.

        Returns:
            Those that were new, and whose schedule is still there and not paused.

        Raises:
            database.Fenced: another broker leads.
        """
        kept: list[schedules.Firing] = []
        with self._base.write(epoch) as session:
            for each in sorted(began, key=lambda each: each.begins_us):
                row = session.get(tables.Schedule, each.schedule)
                if row is None or row.paused or each.begins_us < row.since_us:
                    continue
                row.since_us = each.begins_us + 1
                session.add(tables.Firing(**dataclasses.asdict(each)))
                kept.append(each)
            session.flush()
            for name in {each.schedule for each in kept}:
                _forget(session, name)
        return tuple(kept)

    def began(self, name: str, count: int) -> tuple[schedules.Firing, ...]:
        """Return the newest beginnings of one, newest first; raises `errors.NotFound`."""
        with self._base.read() as session:
            if session.get(tables.Schedule, name) is None:
                raise _unknown(name)
            return tuple(_firing(row) for row in session.scalars(_newest(name).limit(count)))

    def last(self) -> dict[str, schedules.Firing]:
        """Return the newest beginning of each that has begun."""
        newest = (
            sa.select(tables.Firing.schedule, sa.func.max(tables.Firing.begins_us).label("at"))
            .group_by(tables.Firing.schedule)
            .subquery()
        )
        both = sa.and_(
            tables.Firing.schedule == newest.c.schedule, tables.Firing.begins_us == newest.c.at
        )
        with self._base.read() as session:
            rows = session.scalars(sa.select(tables.Firing).join(newest, both))
            return {row.schedule: _firing(row) for row in rows}


def _newest(name: str) -> sa.Select[tables.Firing]:
    mine = sa.select(tables.Firing).where(tables.Firing.schedule == name)
    return mine.order_by(tables.Firing.begins_us.desc())


def _forget(session: orm.Session, name: str) -> None:
    """Forget all beginnings of one but the newest `KEPT`."""
    oldest = session.scalar(_newest(name).offset(KEPT - 1).limit(1))
    if oldest is not None:
        old = (tables.Firing.schedule == name, tables.Firing.begins_us < oldest.begins_us)
        session.execute(sa.delete(tables.Firing).where(*old))


def _firing(row: tables.Firing) -> schedules.Firing:
    names = (field.name for field in dataclasses.fields(schedules.Firing))
    return schedules.Firing(**{name: getattr(row, name) for name in names})


def _unknown(name: str) -> errors.NotFound:
    return errors.NotFound(f"schedule {name}: unknown; `fctl schedule list` lists what is")


def _schedule(row: tables.Schedule) -> schedules.Schedule:
    return schedules.Schedule(
        row.name, row.model, row.floor, row.cron, row.until, row.zone, row.paused, row.since_us
    )
