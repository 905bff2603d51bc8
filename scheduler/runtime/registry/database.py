"""The registry's database: engines, transactions and migrations, the same on SQLite and PostgreSQL.

SQLite takes the write lock when a writing transaction begins (BEGIN IMMEDIATE): a transaction that
reads first and writes later would otherwise fail at once with "database is locked", whatever the
busy timeout. Sessions are short and synchronous and run in threads; nothing awaits inside one, so a
cancelled task can't leave one open.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

from scheduler.runtime.registry import tables

BUSY_MS = 30_000
# libpq's own names: a server whose host has vanished ends no connection by itself.
POSTGRES: Mapping[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 10_000,
}
VERSION_TABLE = "registry_version"
_WRITES = "forebay_writes"
_MIGRATION_LOCK = 0x464F5245  # any number that is only ours, for pg_advisory_xact_lock


class Fenced(Exception):
    """Another broker leads: this write is of an older epoch and was not made."""


class Database:
    """One database and its two kinds of transaction."""

    def __init__(self, url: str) -> None:
        self.url = sa.make_url(url)
        sqlite = self.url.get_backend_name() == "sqlite"
        options: dict[str, Any] = {"pool_pre_ping": not sqlite}
        if sqlite:
            options["connect_args"] = {"timeout": BUSY_MS / 1000, "check_same_thread": False}
        else:
            options["connect_args"] = POSTGRES
        self._engine = sa.create_engine(self.url, **options)
        if sqlite:
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
        self._writing = self._engine.execution_options(**{_WRITES: True})

    @contextlib.contextmanager
    def read(self) -> Iterator[orm.Session]:
        """Open a session that reads one consistent state."""
        with orm.Session(self._engine) as session:
            yield session

    @contextlib.contextmanager
    def write(self, epoch: int | None = None) -> Iterator[orm.Session]:
        """Open a session that commits at the end, and rolls back if the body raises.

        Args:
            epoch: the leader's; None for what is not the leader's business (keys, wishes).

        Raises:
            Fenced: ``epoch`` is not the newest.
        """
        with orm.Session(self._writing) as session, session.begin():
            if epoch is not None:
                _fence(session, epoch)
            yield session

    def upgrade(self, revision: str = "head") -> None:
        """Bring the schema up to ``revision``; several processes may do so at once."""
        from alembic import command

        self._migrate(lambda config: command.upgrade(config, revision))

    def downgrade(self, revision: str) -> None:
        """Take the schema back to ``revision`` (``base``: empty)."""
        from alembic import command

        self._migrate(lambda config: command.downgrade(config, revision))

    def differences(self) -> list[Any]:
        """Return what the models have that the migrations have not made, empty if they agree."""
        from alembic import autogenerate, migration

        with self._engine.connect() as connection:
            context = migration.MigrationContext.configure(
                connection,
                opts={
                    "version_table": VERSION_TABLE,
                    "compare_type": True,
                    "include_object": ours,
                },
            )
            return list(autogenerate.compare_metadata(context, tables.Base.metadata))

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _migrate(self, act: Any) -> None:
        import alembic.config

        with self._writing.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config = alembic.config.Config()
            config.set_main_option("script_location", "scheduler.runtime:migrations")
            config.attributes["connection"] = connection
            act(config)


def ours(thing: Any, name: str | None, kind: str, reflected: bool, other: Any) -> bool:
    """Return whether a table is the registry's: other parts may keep theirs in the same database."""
    del thing, reflected, other
    return kind != "table" or name in tables.Base.metadata.tables


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    del record
    connection.isolation_level = None  # we begin transactions ourselves, below
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _fence(session: orm.Session, epoch: int) -> None:
    query = sa.select(tables.Leadership.epoch).where(tables.Leadership.name == "broker")
    newest = session.scalar(query.with_for_update(read=True))
    if newest != epoch:
        raise Fenced(f"epoch {epoch} is over, the newest is {newest}: another broker leads")


def sqlite_url(state_dir: Path) -> str:
    """Return the URL of the registry in a state folder."""
    return f"sqlite:///{state_dir / 'registry.sqlite'}"
