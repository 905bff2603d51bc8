"""What admins want done with weights on nodes' disks; one fact, read and written whole: there are few."""

import dataclasses

from scheduler.contracts import stored
from scheduler.runtime import node_weights
from scheduler.runtime.registry import database, journal, tables

NAME = "weight_acts"


class WeightActs:
    """Reads and writes of acts."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def all(self) -> tuple[node_weights.Act, ...]:
        """Return the acts that are not over."""
        with self._base.read() as session:
            row = session.get(tables.Fact, NAME)
            return _read(row)

    def add(self, act: node_weights.Act, who: str) -> None:
        """Ask for one."""
        with self._base.write() as session:
            row = _row(session.get(tables.Fact, NAME, with_for_update=True), act.at_us)
            session.add(row)
            row.at_us = act.at_us
            row.body = {"acts": [*row.body.get("acts", []), dataclasses.asdict(act)]}
            told = f"{act.act} {act.uri} asked by {who}"
            journal.note(session, act.at_us, act.node or "every node", told)

    def end(self, over: list[str], epoch: int, now_us: int) -> None:
        """Forget acts; raises `database.Fenced` if another broker leads."""
        with self._base.write(epoch) as session:
            row = _row(session.get(tables.Fact, NAME, with_for_update=True), now_us)
            session.add(row)
            left = [act for act in row.body.get("acts", []) if act["act_id"] not in over]
            row.at_us, row.body = now_us, {"acts": left}


def _row(found: tables.Fact | None, now_us: int) -> tables.Fact:
    return tables.Fact(name=NAME, at_us=now_us, body={}) if found is None else found


def _read(row: tables.Fact | None) -> tuple[node_weights.Act, ...]:
    body = {} if row is None else row.body
    return tuple(stored.read(node_weights.Act, act) for act in body.get("acts", []))
