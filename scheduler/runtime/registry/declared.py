"""The declared catalog in the registry: entries, revisions, and what the broker runs of them.

Each change is one transaction: it takes the state's row, edits the whole, and writes the entries that differ,
the revision with author and reason, and the rows of models, versions, routes and deployments made of them.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors, spec_json
from scheduler.core import replicas, rollouts
from scheduler.runtime import config
from scheduler.runtime.models import changes, compiled, document, imported
from scheduler.runtime.registry import database, tables

CHANNEL = "forebay_catalog"  # PostgreSQL's NOTIFY
STATE = "catalog"
OVER = rollouts.State.OVER.value
KEPT = 10_000  # revisions; a site that rolls out ten times a day has them for three years


@dataclasses.dataclass(frozen=True, slots=True)
class Revision:
    """One change of the catalog."""

    revision: int
    at_us: int
    author: str
    reason: str
    changes: tuple[changes.Change, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Signed:
    """Who makes a change, why and when (UTC µs)."""

    author: str
    reason: str
    now_us: int


class Stale(Exception):
    """Another change was faster."""


class Catalogue:
    """Reads and changes of what is declared."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def serial(self) -> int:
        """Return a number that every change of the catalog and every admin's wish moves."""
        with self._base.read() as session:
            found = session.scalar(sa.select(tables.DeclaredState.serial))
            return int(found or 0)

    def read(self) -> tuple[int, document.Document]:
        """Return the newest revision and the document."""
        with self._base.read() as session:
            state = session.get_one(tables.DeclaredState, STATE)
            return state.revision, document.whole(entries(session))

    def history(self, limit: int = 50, model: str = "") -> tuple[Revision, ...]:
        """Return the newest revisions, the newest first; of one model if ``model`` names it."""
        query = sa.select(tables.DeclaredChange).order_by(tables.DeclaredChange.revision.desc())
        with self._base.read() as session:
            found: list[Revision] = []
            for row in session.scalars(query if model else query.limit(limit)):
                each = _revision(row)
                if not model or any(model in made.key[1:] for made in each.changes):
                    found.append(each)
                if len(found) == limit:
                    break
            return tuple(found)

    def entries(self) -> tuple[int, dict[document.Key, dict[str, Any]]]:
        """Return the newest revision and the entries in force."""
        with self._base.read() as session:
            return session.get_one(tables.DeclaredState, STATE).revision, entries(session)

    def then(self, revision: int) -> tuple[int, dict[document.Key, Any]]:
        """Return the newest revision, and the entries as they were at ``revision``.

        Raises:
            errors.NotFound: it is not kept, or has not been.
        """
        with self._base.read() as session:
            state = session.get_one(tables.DeclaredState, STATE)
            oldest = session.scalar(sa.select(sa.func.min(tables.DeclaredChange.revision)))
            if not (oldest or 1) - 1 <= revision <= state.revision:
                raise errors.NotFound(
                    f"revision {revision}: unknown; `fctl history` lists what there is"
                )
            query = (
                sa.select(tables.DeclaredChange)
                .where(tables.DeclaredChange.revision > revision)
                .order_by(tables.DeclaredChange.revision.desc())
            )
            later = [_revision(row).changes for row in session.scalars(query)]
            return state.revision, changes.undone(entries(session), later)

    def commit(
        self, after: document.Entries, base: int, signed: Signed, *, dry_run: bool = False
    ) -> Revision:
        """Make ``after`` the entries in force; without any difference nothing is written.

        Args:
            after: what was made of the entries at revision ``base``.
            base: that revision.
            signed: who, why, when.
            dry_run: write nothing, only tell the difference.

        Raises:
            Stale: there is a newer revision: make it anew from that.
        """
        with self._base.write() as session:
            state = _locked(session)
            if state.revision != base:
                raise Stale(f"revision {state.revision} has come meanwhile")
            return change(session, after, signed, dry_run=dry_run)

    def declare(self, models: "tuple[config.ModelSettings, ...]", now_us: int) -> None:
        """Take up forebay.toml; see `models.imported`."""
        file = imported.of_file(models)
        with self._base.write() as session:
            state = _locked(session)
            before = state.imported
            after, said = imported.merged(entries(session), before, file)
            anew = {
                name for name in said.keys() | before.keys() if said.get(name) != before.get(name)
            }
            if anew:
                state.imported = said
            ended = _end_rollouts(session, anew, now_us)
            signed = Signed(imported.AUTHOR, "forebay.toml has changed", now_us)
            made = change(session, after, signed)
            if ended and not made.changes:
                run(session, whole(session), now_us)
                moved(session)

    def forget(self, epoch: int) -> int:
        """Delete what is run of versions that nobody declares any more, once no replica is of them.

        Args:
            epoch: the leader's; raises `database.Fenced` if another broker leads.

        Returns:
            How many versions are gone.
        """
        with self._base.write(epoch) as session:
            _locked(session)
            running = sa.select(tables.Replica.model, tables.Replica.version).where(
                tables.Replica.state.not_in(replicas.FINALS)
            )
            kept = {tuple(key) for key in session.execute(running)}
            kept |= {(model, name) for kind, model, name in entries(session) if kind == "version"}
            # In the order of their foreign keys.
            _drop(session, session.scalars(sa.select(tables.Deployment)), kept)
            gone = _drop(session, session.scalars(sa.select(tables.Version)), kept)
            if gone:
                moved(session)
            return gone


def _drop(
    session: orm.Session,
    rows: Iterable[tables.Deployment | tables.Version],
    kept: Collection[tuple[str, ...]],
) -> int:
    gone = [row for row in rows if (row.model, row.version) not in kept]
    for row in gone:
        session.delete(row)
    session.flush()
    return len(gone)


def _end_rollouts(session: orm.Session, models: Collection[str], now_us: int) -> bool:
    """End the rollouts of models that are declared anew, route and all; return whether there was one."""
    query = sa.select(tables.Rollout).where(tables.Rollout.state != OVER)
    rows = [row for row in session.scalars(query) if row.model in models]
    for row in rows:
        row.state = OVER
        row.body = {
            **row.body,
            "state": OVER,
            "outcome": "rolled back",
            "since_us": now_us,
            "reason": f"{imported.AUTHOR} declares {row.model} anew",
        }
    session.flush()
    return bool(rows)


def moved(session: orm.Session) -> None:
    """Tell every watcher that something about models has changed, once this transaction is done."""
    state = _locked(session)
    state.serial += 1
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sa.select(sa.func.pg_notify(CHANNEL, str(state.serial))))


def whole(session: orm.Session) -> document.Document:
    """Return the document in force."""
    return document.whole(entries(session))


def rolling(session: orm.Session) -> dict[str, frozenset[str]]:
    """Return the versions that rollouts keep warm, by model."""
    rows = session.scalars(sa.select(tables.Rollout).where(tables.Rollout.state != OVER))
    return {row.model: frozenset({row.body["version"], *row.body["before"]}) for row in rows}


def run(session: orm.Session, found: document.Document, now_us: int) -> None:
    """Write what the broker runs of a document; what only a newer release can read stays as it is."""
    kept = rolling(session)
    session.flush()
    listed = sa.select(tables.Declared.model).where(tables.Declared.kind == "model")
    unread = set(session.scalars(listed)) - found.models.keys()
    named = {(name, version) for name, model in found.models.items() for version in model.versions}
    for row in session.scalars(sa.select(tables.Deployment)):
        if (row.model, row.version) not in named and row.model not in unread:
            row.configured, row.scaled, row.scaling = 0, None, {}
    routed = {name for name, model in found.models.items() if model.route.versions}
    for route in session.scalars(sa.select(tables.Route)):
        if route.model not in routed | unread:
            session.delete(route)
    for name, model in found.models.items():
        _run_model(session, name, model, found, now_us)
        profile = found.profiles.get(model.profile)
        for each in compiled.deployed(name, model, profile, kept.get(name, frozenset())):
            _run_version(session, each, now_us)
        session.flush()


def _run_model(
    session: orm.Session, name: str, model: document.Model, found: document.Document, now_us: int
) -> None:
    row = session.get(tables.Model, name)
    if row is None:
        row = tables.Model(name=name, created_us=now_us)
        session.add(row)
    base, pools = compiled.base_context(model), compiled.pools(model)
    row.max_context = max([base, *(pool.max_context for pool in pools)])
    row.tiers = [tier.value for tier in model.tiers]
    session.flush()
    if not model.route.versions:
        return
    route = session.get(tables.Route, name)
    if route is None:
        route = tables.Route(model=name)
        session.add(route)
    route.weights = dict(model.route.versions)
    route.rules = {
        "tiers": [tier.value for tier in model.tiers],
        "callers": list(model.callers),
        "adapters": {adapter: one.team for adapter, one in model.adapters.items()},
        "preload": [adapter for adapter, one in model.adapters.items() if one.preload],
        "shadow": model.route.shadow.model_dump() if model.route.shadow else {},
        "pools": [dataclasses.asdict(pool) for pool in pools],
        "base_context": base if pools else 0,
        "runner": compiled.runner(model).value,
    }


def _run_version(session: orm.Session, each: compiled.Deployed, now_us: int) -> None:
    spec = each.spec
    version = session.get(tables.Version, (spec.model, spec.version))
    if version is None:
        version = tables.Version(model=spec.model, version=spec.version, created_us=now_us)
        session.add(version)
    version.spec = spec_json.write(spec)
    session.flush()
    wanted = session.get(tables.Deployment, (spec.model, spec.version))
    if wanted is None:
        wanted = tables.Deployment(
            model=spec.model,
            version=spec.version,
            scaled=None,
            hold_batch=False,
            quarantined_until_us=0,
            quarantine_reason="",
        )
        session.add(wanted)
    wanted.configured = each.replicas
    wanted.role = each.role.value
    wanted.scaling = dict(each.scaling)
    wanted.gpus = spec.gpus


def change(
    session: orm.Session, after: document.Entries, signed: Signed, *, dry_run: bool = False
) -> Revision:
    """Write a revision within a transaction that has taken the state's row."""
    state = _locked(session)
    made = changes.between(entries(session), after)
    found = Revision(state.revision + bool(made), signed.now_us, signed.author, signed.reason, made)
    if dry_run or not made:
        return found
    state.revision = found.revision
    for each in made:
        _write(session, each, found.revision)
    session.add(
        tables.DeclaredChange(
            revision=found.revision,
            at_us=signed.now_us,
            author=signed.author,
            reason=signed.reason,
            changes=[each.to_json() for each in made],
        )
    )
    session.execute(
        sa.delete(tables.DeclaredChange).where(
            tables.DeclaredChange.revision <= found.revision - KEPT
        )
    )
    run(session, document.whole(after), signed.now_us)
    moved(session)
    return found


def _write(session: orm.Session, made: changes.Change, revision: int) -> None:
    kind, model, name = made.key
    row = session.get(tables.Declared, made.key)
    if made.after is None:
        session.delete(row)
        return
    if row is None:
        row = tables.Declared(kind=kind, model=model, name=name)
        session.add(row)
    row.body, row.revision = dict(made.after), revision


def _locked(session: orm.Session) -> tables.DeclaredState:
    return session.get_one(tables.DeclaredState, STATE, with_for_update=True)


def entries(session: orm.Session) -> dict[document.Key, dict[str, Any]]:
    """Return the entries in force."""
    rows = session.scalars(sa.select(tables.Declared))
    return {(row.kind, row.model, row.name): dict(row.body) for row in rows}


def _revision(row: tables.DeclaredChange) -> Revision:
    made = tuple(changes.Change.from_json(each) for each in row.changes)
    return Revision(row.revision, row.at_us, row.author, row.reason, made)
