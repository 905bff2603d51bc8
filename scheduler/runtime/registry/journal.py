"""The leader's journal: plans with reasons, events, and its newest word for other processes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.runtime.registry import database, tables

EVENTS_KEPT = 5000


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A plan, an event or a fact as it was written."""

    at_us: int
    name: str
    body: dict[str, Any]


class Journal:
    """What happened and why."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def add_plan(self, epoch: int, at_us: int, body: dict[str, Any], *, keep: int) -> None:
        """Keep a plan that had actions; the newest ``keep`` stay."""
        with self._base.write(epoch) as session:
            row = tables.Plan(at_us=at_us, epoch=epoch, body=body)
            session.add(row)
            session.flush()
            session.execute(sa.delete(tables.Plan).where(tables.Plan.plan_id <= row.plan_id - keep))

    def plans(self, limit: int = 1) -> tuple[Entry, ...]:
        """Return the newest plans with actions, the newest first."""
        query = sa.select(tables.Plan).order_by(tables.Plan.plan_id.desc()).limit(limit)
        with self._base.read() as session:
            return tuple(
                Entry(row.at_us, f"epoch {row.epoch}", row.body) for row in session.scalars(query)
            )

    def events(self, limit: int = 50) -> tuple[Entry, ...]:
        """Return the newest events, the newest first."""
        query = sa.select(tables.Event).order_by(tables.Event.event_id.desc()).limit(limit)
        with self._base.read() as session:
            return tuple(
                Entry(row.at_us, row.subject, {"text": row.text}) for row in session.scalars(query)
            )

    def set_facts(self, epoch: int, at_us: int, facts: Mapping[str, dict[str, Any]]) -> None:
        """Replace the leader's word on each name."""
        with self._base.write(epoch) as session:
            for name, body in facts.items():
                row = session.get(tables.Fact, name)
                if row is None:
                    session.add(tables.Fact(name=name, at_us=at_us, body=body))
                else:
                    row.at_us, row.body = at_us, body

    def fact(self, name: str) -> Entry | None:
        """Return the leader's newest word on ``name``, None before the first."""
        with self._base.read() as session:
            row = session.get(tables.Fact, name)
            return None if row is None else Entry(row.at_us, row.name, row.body)


def note(session: orm.Session, at_us: int, subject: str, text: str) -> None:
    """Keep an event with the change that it tells of; the newest few thousand stay."""
    row = tables.Event(at_us=at_us, subject=subject, text=text)
    session.add(row)
    session.flush()
    session.execute(
        sa.delete(tables.Event).where(tables.Event.event_id <= row.event_id - EVENTS_KEPT)
    )
