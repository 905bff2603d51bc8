"""The registry on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.runtime.registry import database, store
from tests import realpostgres, registries

_KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=_KINDS)
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "sqlite":
        return database.sqlite_url(tmp_path)
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(scope="session")
def migrated(postgres_server: str) -> Iterator[str]:
    """Return the name of a registry as migrations make it: longer work than what most tests do."""
    with realpostgres.database(postgres_server, name="migrated") as url:
        store.Registry.open(url).close()
        yield "migrated"


@pytest.fixture(params=_KINDS)
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[store.Registry]:
    """Return a registry on each kind of database."""
    if request.param == "sqlite":
        opened = registries.opened(tmp_path)
        yield opened
        opened.close()
        return
    server, migrated = (str(request.getfixturevalue(n)) for n in ("postgres_server", "migrated"))
    with realpostgres.database(server, template=migrated) as url:
        opened = store.Registry.open(url, migrate=False)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def standing_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[store.Registry]:
    """Return a registry that stays: who takes it renews it first."""
    opened = registries.opened(tmp_path_factory.mktemp("standing"))
    yield opened
    opened.close()
