"""What the registry forgets of leases that are long over, so that its rows stay bounded.

GPU time is not kept here but in the recorded rows (`accounting`), so nothing that anybody pays for goes. What
people look up (`fctl show`), and what tells a leader that a job in Slurm's queue is of a lease that has
ended, are the newest rows, and these stay.
"""

import collections
import dataclasses
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import fleet
from scheduler.core import replicas
from scheduler.runtime.registry import database, holdings, tables

AT_ONCE = 500  # rows of a transaction: nobody else's write waits long
SLOTS_KEPT = (
    50  # of a lease that goes on; the newest of them has the number that the next one follows
)

_OVER = [state for state in replicas.SlotState if state.final]


@dataclasses.dataclass(frozen=True, slots=True)
class Forgotten:
    """Rows that a pass has deleted; `more` if it has left some for the next."""

    leases: int = 0
    slots: int = 0
    replicas: int = 0
    more: bool = False


class Retention:
    """Deletes leases that have ended with what was in them, and what has ended in leases that go on."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def forget(self, epoch: int, before_us: int, most: int) -> Forgotten:
        """Delete what is old or beyond the newest; one short transaction.

        The newest `holdings.ENDED_KEPT` leases and replicas stay however old they are.

        Args:
            epoch: the leader's; raises `database.Fenced`.
            before_us: what ended before goes, UTC µs.
            most: ended leases, and ended replicas, that are kept at most.
        """
        ended = tables.Lease.state == fleet.LeaseState.ENDED
        final = tables.Replica.state.in_(replicas.FINALS)
        with self._base.write(epoch) as session:
            until = _until(session, tables.Lease.ended_us, ended, before_us, most)
            leases = _ids(session, tables.Lease.lease_id, tables.Lease.ended_us, ended, until)
            until = _until(session, tables.Replica.ended_us, final, before_us, most)
            those = _ids(session, tables.Replica.replica_id, tables.Replica.ended_us, final, until)
            inside = session.scalars(
                sa.select(tables.Replica.replica_id).where(tables.Replica.lease_id.in_(leases))
            ).all()
            gone = {*those, *inside}
            _delete(session, tables.Replica.replica_id, gone)
            slots = {*_slots_of(session, leases), *_crowding(session)}
            _delete(session, tables.Slot.slot_id, slots)
            _delete(session, tables.Lease.lease_id, leases)
        more = AT_ONCE in {len(leases), len(those)}
        return Forgotten(len(leases), len(slots), len(gone), more)


def _until(
    session: orm.Session,
    at: orm.InstrumentedAttribute[int],
    over: sa.ColumnElement[bool],
    before_us: int,
    most: int,
) -> int:
    """Return the time of the newest ending that may go, and 1: what ended earlier goes."""

    def newest(skipped: int) -> int:
        query = sa.select(at).where(over).order_by(at.desc()).offset(skipped).limit(1)
        found = session.scalar(query)
        return 0 if found is None else found + 1

    kept = holdings.ENDED_KEPT
    return max(min(before_us, newest(kept)), newest(max(most, kept)))


def _ids(
    session: orm.Session,
    name: orm.InstrumentedAttribute[str],
    at: orm.InstrumentedAttribute[int],
    over: sa.ColumnElement[bool],
    until: int,
) -> list[str]:
    query = sa.select(name).where(over, at < until).order_by(at).limit(AT_ONCE)
    return list(session.scalars(query))


def _slots_of(session: orm.Session, leases: Iterable[str]) -> list[str]:
    query = sa.select(tables.Slot.slot_id).where(tables.Slot.lease_id.in_(list(leases)))
    return list(session.scalars(query))


def _crowding(session: orm.Session) -> list[str]:
    """Return slots that have ended in leases that have had more than are kept; their newest stay."""
    crowded = (  # by ended ones alone: those in use stay, and must not keep a lease among the first for ever
        sa.select(tables.Slot.lease_id)
        .where(tables.Slot.state.in_(_OVER))
        .group_by(tables.Slot.lease_id)
        .having(sa.func.count() > SLOTS_KEPT)
        .limit(AT_ONCE // SLOTS_KEPT)
    )
    running = sa.select(tables.Replica.slot_id).where(tables.Replica.state.not_in(replicas.FINALS))
    used = set(session.scalars(running))
    slots: dict[str, list[tables.Slot]] = collections.defaultdict(list)
    for slot in session.scalars(sa.select(tables.Slot).where(tables.Slot.lease_id.in_(crowded))):
        slots[slot.lease_id].append(slot)
    return [
        slot.slot_id
        for found in slots.values()
        for slot in sorted(found, key=lambda each: number(each.slot_id))[:-SLOTS_KEPT]
        if slot.state in _OVER and slot.slot_id not in used
    ]


def number(slot_id: str) -> int:
    """Return a slot's number in its lease."""
    return int(slot_id.rsplit(".s", 1)[1])


def _delete(
    session: orm.Session, name: orm.InstrumentedAttribute[str], which: Iterable[str]
) -> None:
    rows = sorted(which)
    for first in range(0, len(rows), AT_ONCE):
        part = rows[first : first + AT_ONCE]
        session.execute(sa.delete(name.class_).where(name.in_(part)))
