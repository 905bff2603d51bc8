"""The declared catalog in the registry: entries, revisions, and what the broker runs of them.

Each change is one transaction: it takes the state's row, edits the whole, and writes the entries that differ,
the revision with author and reason, and the rows of models, versions, routes and deployments made of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.contracts import errors
from scheduler.runtime import config
from scheduler.runtime.models import changes, compiled, document, imported
from scheduler.runtime.registry import database, spec_json, tables

CHANNEL = "forebay_catalog"  # PostgreSQL's NOTIFY
STATE = "catalog"
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


Edit = Callable[[dict[document.Key, Any]], dict[document.Key, Any]]


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
            return state.revision, document.whole(_entries(session))

    def history(self, limit: int = 50, model: str = "") -> tuple[Revision, ...]:
        """Return the newest revisions, the newest first; of one model if ``model`` names it."""
        query = sa.select(tables.DeclaredChange).order_by(tables.DeclaredChange.revision.desc())
        with self._base.read() as session:
            found: list[Revision] = []
            for row in session.scalars(query if model else query.limit(limit)):
                each = _revision(row)
                if not model or any(model in change.key[1:] for change in each.changes):
                    found.append(each)
                if len(found) == limit:
                    break
            return tuple(found)

    def change(self, edit: Edit, signed: Signed, *, dry_run: bool = False) -> Revision:
        """Edit the entries and return the new revision; without any difference nothing is written.

        Args:
            edit: takes the entries in force and returns those that shall be; raises what is wrong.
            signed: who, why, when.
            dry_run: write nothing, only tell the difference.
        """
        with self._base.write() as session:
            return _change(session, edit, signed, dry_run=dry_run)

    def revert(self, revision: int, signed: Signed, check: Edit) -> Revision:
        """Go back to the entries as they were at ``revision``; that is a revision of its own.

        Raises:
            errors.NotFound: it is not kept, or has not been.
        """
        with self._base.write() as session:
            state = _locked(session)
            oldest = session.scalar(sa.select(sa.func.min(tables.DeclaredChange.revision)))
            if not 0 <= revision <= state.revision or (oldest or 1) - 1 > revision:
                raise errors.NotFound(
                    f"revision {revision}: unknown; `fctl history` lists what there is"
                )
            query = (
                sa.select(tables.DeclaredChange)
                .where(tables.DeclaredChange.revision > revision)
                .order_by(tables.DeclaredChange.revision.desc())
            )
            later = [_revision(row).changes for row in session.scalars(query)]
            return _change(session, lambda now: check(changes.undone(now, later)), signed)

    def declare(self, models: "tuple[config.ModelSettings, ...]", now_us: int) -> None:
        """Take up forebay.toml; see `models.imported`."""
        file = imported.of_file(models)
        with self._base.write() as session:
            state = _locked(session)
            after, said = imported.merged(_entries(session), state.imported, file)
            if said != state.imported:
                state.imported = said
            signed = Signed(imported.AUTHOR, "forebay.toml has changed", now_us)
            _change(session, lambda _: after, signed)


def moved(session: orm.Session) -> None:
    """Tell every watcher that something about models has changed, once this transaction is done."""
    state = _locked(session)
    state.serial += 1
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sa.select(sa.func.pg_notify(CHANNEL, str(state.serial))))


def rolling(session: orm.Session) -> dict[str, frozenset[str]]:
    """Return the versions that rollouts keep warm, by model."""
    rows = session.scalars(sa.select(tables.Rollout).where(tables.Rollout.state != "over"))
    return {row.model: frozenset({row.body["version"], *row.body["before"]}) for row in rows}


def run(session: orm.Session, found: document.Document, now_us: int) -> None:
    """Write what the broker runs of a document."""
    kept = rolling(session)
    named = {(name, version) for name, model in found.models.items() for version in model.versions}
    for row in session.scalars(sa.select(tables.Deployment)):
        if (row.model, row.version) not in named:
            row.configured, row.scaled, row.scaling = 0, None, {}
    routed = {name for name, model in found.models.items() if model.route.versions}
    for route in session.scalars(sa.select(tables.Route)):
        if route.model not in routed:
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
    answering = [model.versions[each] for each, share in model.route.versions.items() if share]
    # What every version takes: a request must not wait for one that can't.
    contexts = [each.max_context for each in answering or model.versions.values()]
    row.max_context = min(contexts, default=0)
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
        "callers": list(model.callers),
        "adapters": {adapter: one.team for adapter, one in model.adapters.items()},
        "shadow": model.route.shadow.model_dump() if model.route.shadow else {},
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


def _change(session: orm.Session, edit: Edit, signed: Signed, *, dry_run: bool = False) -> Revision:
    state = _locked(session)
    before = _entries(session)
    after = edit(dict(before))
    made = changes.between(before, after)
    found = Revision(state.revision + bool(made), signed.now_us, signed.author, signed.reason, made)
    if dry_run or not made:
        return found
    state.revision = found.revision
    for change in made:
        kind, model, name = change.key
        row = session.get(tables.Declared, change.key)
        if change.after is None:
            session.delete(row)
        elif row is None:
            session.add(
                tables.Declared(
                    kind=kind,
                    model=model,
                    name=name,
                    body=dict(change.after),
                    revision=found.revision,
                )
            )
        else:
            row.body, row.revision = dict(change.after), found.revision
    session.add(
        tables.DeclaredChange(
            revision=found.revision,
            at_us=signed.now_us,
            author=signed.author,
            reason=signed.reason,
            changes=[change.to_json() for change in made],
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


def _locked(session: orm.Session) -> tables.DeclaredState:
    return session.get_one(tables.DeclaredState, STATE, with_for_update=True)


def _entries(session: orm.Session) -> dict[document.Key, dict[str, Any]]:
    rows = session.scalars(sa.select(tables.Declared))
    return {(row.kind, row.model, row.name): dict(row.body) for row in rows}


def _revision(row: tables.DeclaredChange) -> Revision:
    made = tuple(changes.Change.from_json(each) for each in row.changes)
    return Revision(row.revision, row.at_us, row.author, row.reason, made)
