"""Schedules in the registry."""

import sqlalchemy as sa

from scheduler.contracts import errors
from scheduler.runtime import schedules
from scheduler.runtime.registry import database, tables

MOST = 1000  # schedules; each is looked at every second


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
                )
            )

    def pause(self, name: str, paused: bool) -> None:
        """Pause one, or let it go on; raises `errors.NotFound`."""
        with self._base.write() as session:
            row = session.get(tables.Schedule, name)
            if row is None:
                raise _unknown(name)
            row.paused = paused

    def remove(self, name: str) -> None:
        """Forget one; raises `errors.NotFound`."""
        with self._base.write() as session:
            row = session.get(tables.Schedule, name)
            if row is None:
                raise _unknown(name)
            session.delete(row)


def _unknown(name: str) -> errors.NotFound:
    return errors.NotFound(f"schedule {name}: unknown; `fctl schedule list` lists what is")


def _schedule(row: tables.Schedule) -> schedules.Schedule:
    return schedules.Schedule(
        row.name, row.model, row.floor, row.cron, row.until, row.zone, row.paused
    )
