"""The registry on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.runtime.registry import database, store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "sqlite":
        return database.sqlite_url(tmp_path)
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def registry(registry_url: str) -> Iterator[store.Registry]:
    """Return a registry on each kind of database."""
    opened = store.Registry.open(registry_url)
    yield opened
    opened.close()
