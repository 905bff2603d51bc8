"""New registries for tests: migrating one takes longer than most of what a test does with it."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from batch_jobs import store as jobs
from scheduler.runtime.registry import database, store

_FILE = "registry.sqlite"


def opened(folder: Path) -> store.Registry:
    """Open a folder's registry; a new one is a copy of one that was migrated once."""
    fresh = _copied(folder, _registry)
    return store.Registry.open(database.sqlite_url(folder), migrate=not fresh)


def jobs_ready(folder: Path) -> bool:
    """Put batch jobs' tables into a folder, as migrations make them; False if there is a registry."""
    return _copied(folder, _jobs)


def _copied(folder: Path, made: Callable[[], bytes]) -> bool:
    path = folder / _FILE
    if path.exists():
        return False
    path.write_bytes(made())
    return True


@functools.cache
def _registry() -> bytes:
    return _migrated(lambda url: store.Registry.open(url).close())


@functools.cache
def _jobs() -> bytes:
    return _migrated(lambda url: jobs.open_store(url).close())


def _migrated(migrate: Callable[[str], None]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        migrate(database.sqlite_url(Path(name)))
        return (Path(name) / _FILE).read_bytes()


@functools.cache
def filled(fill: Callable[[store.Registry], None]) -> bytes:
    """Return the file of a registry that ``fill``, a function of a module, has written to once."""
    with tempfile.TemporaryDirectory() as name:
        registry = opened(Path(name))
        try:
            fill(registry)
        finally:
            registry.close()  # what is in the write-ahead log goes into the file
        return (Path(name) / _FILE).read_bytes()


def renew(registry: store.Registry, state: bytes = b"") -> None:
    """Make a registry in a file as new, or as `filled`; what SQLAlchemy has compiled for it is kept."""
    registry.close()
    path = Path(str(registry.database.url.database))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(state or _registry())
