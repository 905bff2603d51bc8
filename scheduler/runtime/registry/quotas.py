"""Limits of quotas with their history, and the counters of days and months.

Counters change by differences only, so that several owners and the check against the ledger can add to
one without reading it first. A batch of differences carries its owner's number: one that is sent again,
because nobody heard whether it was written, is not added again.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.contracts import errors
from scheduler.core import quota_limits as limits
from scheduler.runtime.registry import database, journal, tables

Place = tuple[limits.Key, int]  # a counter, and the UTC µs at which its window begins
KEPT_US = 400 * 86_400_000_000  # counters older than 13 months are of no use to anybody
FRESH_US = 10_000_000  # an owner that was not heard for so long holds nothing
_NAMES = ("scope", "team", "name", "model", "tier", "kind")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A limit with who set it, when and why."""

    limit: limits.Limit
    author: str
    reason: str
    created_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One entry of the history; `amount` None where the limit was removed."""

    at_us: int
    key: limits.Key
    amount: int | None
    hard: bool
    author: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """A counter as it stands in the registry."""

    amount: int
    drift: int
    checked_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """What an owner has to hear.

    Attributes:
        rules: every limit, None if none has changed.
        sums: whole sums of the counters that have changed.
        drifts: what the ledger corrected last in these, for those that were ever corrected.
        seen: (revision of the limits, revision of the counters) that this news brings one up to.
    """

    rules: tuple[limits.Limit, ...] | None
    sums: Mapping[Place, int]
    drifts: Mapping[Place, int]
    seen: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What an owner tells.

    Attributes:
        owner: unique to the process's life.
        batch: number of the differences, 0 if there are none.
        differences: what was settled since the last batch.
        running: what is used now of quotas that only the owner counts.
        notices: (UTC µs, text) for the events.
    """

    owner: str
    batch: int = 0
    differences: Mapping[Place, int] = dataclasses.field(default_factory=dict)
    running: Mapping[limits.Key, int] | None = None
    notices: Sequence[tuple[int, str]] = ()


class Quotas:
    """The registry's quotas."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def rules(self) -> tuple[Rule, ...]:
        """Return every limit in force, by its names."""
        with self._base.read() as session:
            return _rules(session)

    def change(
        self,
        wanted: Mapping[limits.Key, int | None],
        *,
        hard: bool,
        author: str,
        reason: str,
        now_us: int,
    ) -> None:
        """Set limits, or remove those whose amount is None: all or none.

        Raises:
            errors.NotFound: a limit to be removed is not there.
        """
        with self._base.write() as session:
            _bump(session, "limits")
            _bump(session, "check")  # a counter that begins now starts from what the ledger has
            for key, amount in wanted.items():
                row = session.get(tables.QuotaLimit, tuple(_columns(key).values()))
                if amount is None:
                    if row is None:
                        raise errors.NotFound(f"{key}: no such limit; see `fctl quota show`")
                    session.delete(row)
                else:
                    if row is None:
                        row = tables.QuotaLimit(**_columns(key))
                        session.add(row)
                    row.amount, row.hard, row.created_us = amount, hard, now_us
                    row.author, row.reason = author, reason
                session.add(
                    tables.QuotaChange(
                        **_columns(key),
                        at_us=now_us,
                        amount=amount,
                        hard=hard,
                        author=author,
                        reason=reason,
                    )
                )
                to = "removed" if amount is None else key.kind.show(amount)
                journal.note(session, now_us, "quota", f"{key} {to} by {author}")

    def history(self, limit: int = 100) -> tuple[Change, ...]:
        """Return the newest changes, the newest first."""
        query = sa.select(tables.QuotaChange).order_by(tables.QuotaChange.change_id.desc())
        with self._base.read() as session:
            return tuple(
                Change(row.at_us, _key(row), row.amount, row.hard, row.author, row.reason)
                for row in session.scalars(query.limit(limit))
            )

    def exchange(self, report: Report, seen: tuple[int, int], now_us: int) -> News:
        """Add an owner's differences, once, and return what has changed since ``seen``."""
        if not (report.differences or report.notices or report.running is not None):
            with self._base.read() as session:
                return _news(session, seen)
        with self._base.write() as session:
            revision = _bump(session, "counters")
            owner = session.get(tables.QuotaOwner, report.owner)
            if owner is None:
                old = now_us - KEPT_US
                session.execute(sa.delete(tables.QuotaOwner).where(tables.QuotaOwner.at_us < old))
                owner = tables.QuotaOwner(owner=report.owner, batch=0, running=[])
                session.add(owner)
            owner.at_us = now_us
            if report.running is not None:
                owner.running = [
                    [*_columns(key).values(), amount] for key, amount in report.running.items()
                ]
            if report.differences and owner.batch < report.batch:
                owner.batch = report.batch
                _add(session, report.differences, revision)
            for at_us, text in report.notices:
                journal.note(session, at_us, "quota", text)
            session.flush()
            return _news(session, seen)

    def sums(self, places: Sequence[int]) -> dict[Place, Counted]:
        """Return the counters of the windows that begin at ``places``."""
        query = sa.select(tables.QuotaCounter).where(tables.QuotaCounter.window_us.in_(places))
        with self._base.read() as session:
            return {
                (_key(row), row.window_us): Counted(row.amount, row.drift, row.checked_us)
                for row in session.scalars(query)
            }

    def running(self, now_us: int) -> dict[limits.Key, int]:
        """Return what is used now of quotas over a minute and at once, over all owners heard of late."""
        query = sa.select(tables.QuotaOwner).where(tables.QuotaOwner.at_us >= now_us - FRESH_US)
        found: dict[limits.Key, int] = {}
        with self._base.read() as session:
            for row in session.scalars(query):
                for *names, amount in row.running:
                    key = _named(*names)
                    found[key] = found.get(key, 0) + int(amount)
        return found

    def correct(
        self, drifts: Mapping[Place, int], checked_us: Mapping[Place, int], now_us: int
    ) -> None:
        """Add what the ledger has more (or less, below zero) to counters, and note that they were checked.

        Counters that another check has seen to since ``checked_us`` are left alone.
        """
        with self._base.write() as session:
            revision = _bump(session, "counters")
            _add(session, dict.fromkeys(drifts, 0), revision)
            for place, drift in drifts.items():
                key, window_us = place
                row = session.get_one(tables.QuotaCounter, (*_columns(key).values(), window_us))
                if row.checked_us != checked_us.get(place, 0):
                    continue
                row.checked_us = now_us
                row.amount += drift
                if drift:
                    row.drift = drift
                    note = f"{key}: corrected by {key.kind.show(drift)}, as the ledger says"
                    journal.note(session, now_us, "quota", note)
            session.execute(
                sa.delete(tables.QuotaCounter).where(
                    tables.QuotaCounter.window_us < now_us - KEPT_US
                )
            )

    def wish_check(self) -> None:
        """Ask for a comparison with the ledger soon."""
        with self._base.write() as session:
            _bump(session, "check")

    def check_wishes(self) -> int:
        """Return how many comparisons were asked for so far."""
        with self._base.read() as session:
            return session.get_one(tables.QuotaRevision, "check").revision


def _news(session: orm.Session, seen: tuple[int, int]) -> News:
    now = {row.name: row.revision for row in session.scalars(sa.select(tables.QuotaRevision))}
    rules = None
    if now["limits"] != seen[0]:
        rules = tuple(rule.limit for rule in _rules(session))
    sums: dict[Place, int] = {}
    drifts: dict[Place, int] = {}
    if now["counters"] != seen[1]:
        table = tables.QuotaCounter.__table__.c
        columns = [table[name] for name in (*_NAMES, "window_us", "amount", "drift")]
        query = sa.select(*columns).where(table.revision > seen[1])
        for *names, window_us, amount, drift in session.execute(
            query
        ):  # no objects: there are many
            place = _named(*names), window_us
            sums[place] = amount
            if drift:
                drifts[place] = drift
    return News(rules, sums, drifts, (now["limits"], now["counters"]))


def _rules(session: orm.Session) -> tuple[Rule, ...]:
    query = sa.select(tables.QuotaLimit).order_by(
        *(getattr(tables.QuotaLimit, name) for name in ("team", "scope", "name", "model", "tier")),
        tables.QuotaLimit.kind,
    )
    return tuple(
        Rule(limits.Limit(_key(row), row.amount, row.hard), row.author, row.reason, row.created_us)
        for row in session.scalars(query)
    )


def _bump(session: orm.Session, name: str) -> int:
    """Count one change; until the commit nobody else counts one of this name, so order is commit order."""
    query = sa.select(tables.QuotaRevision).where(tables.QuotaRevision.name == name)
    row = session.scalars(query.with_for_update()).one()
    row.revision += 1
    return row.revision


def _add(session: orm.Session, differences: Mapping[Place, int], revision: int) -> None:
    """Add to many counters in one statement, making those that are not there."""
    rows = [
        {
            **_columns(key),
            "window_us": window_us,
            "amount": amount,
            "revision": revision,
            "drift": 0,
            "checked_us": 0,
        }
        for (key, window_us), amount in differences.items()
    ]
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(tables.QuotaCounter)
    statement = statement.on_conflict_do_update(
        index_elements=[*_NAMES, "window_us"],
        set_={
            "amount": tables.QuotaCounter.amount + statement.excluded.amount,
            "revision": statement.excluded.revision,
        },
    )
    session.connection().execute(statement, rows)


def _columns(key: limits.Key) -> dict[str, str]:
    # Plain strings: database drivers have their own ideas of enums.
    return {name: str(value) for name, value in zip(_NAMES, key, strict=True)}


def _key(row: tables.QuotaLimit | tables.QuotaChange | tables.QuotaCounter) -> limits.Key:
    return _named(row.scope, row.team, row.name, row.model, row.tier, row.kind)


def _named(scope: str, team: str, name: str, model: str, tier: str, kind: str) -> limits.Key:
    return limits.Key(limits.Scope(scope), team, name, model, tier, limits.Kind(kind))
