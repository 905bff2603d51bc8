"""A real PostgreSQL for tests: its own folder, a Unix socket, one empty database for each test."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests import endings, services

_USER = "postgres"
_numbers = itertools.count()


def binaries() -> Path | None:
    """Return the folder of initdb and postgres, None if there is none."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    if found:
        places.insert(0, Path(found).resolve().parent)
    return next((place for place in places if (place / "postgres").exists()), None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Start PostgreSQL; yield the folder of its socket. It refuses to run as root, so another user does."""
    folder_of = binaries()
    services.require(folder_of is not None, "PostgreSQL (Debian: apt-get install postgresql)")
    assert folder_of is not None
    root = os.geteuid() == 0
    if root:
        services.require(_known(_USER), f"the Unix user {_USER}, since PostgreSQL refuses root")
    as_user: dict[str, Any] = {"user": _USER, "group": _USER, "extra_groups": []} if root else {}
    folder = Path(tempfile.mkdtemp(prefix="forebay-pg-"))
    try:
        if root:
            shutil.chown(folder, _USER)
        data = folder / "data"
        subprocess.run(
            [
                folder_of / "initdb",
                "-D",
                data,
                "-U",
                _USER,
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--no-sync",
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            **as_user,
        )
        argv = [str(folder_of / "postgres"), "-D", str(data), "-F", "-k", str(folder)]
        server = subprocess.Popen(
            endings.tied("INT", [*argv, "-c", "listen_addresses=", "-c", "logging_collector=off"]),
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            **as_user,
        )
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if "ready to accept connections" in line:
                    break
            else:
                pytest.fail(f"PostgreSQL did not start: exit code {server.wait()}")
            yield str(folder)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty database."""
    with database(postgres_server) as url:
        yield url


@contextlib.contextmanager
def database(server: str, *, name: str = "", template: str = "template1") -> Iterator[str]:
    """Make a database and drop it in the end; yields its SQLAlchemy URL.

    Args:
        server: the folder of the server's socket.
        name: of the database; the next one of a row if not given.
        template: the database that it is a copy of; nobody may be connected to that.
    """
    name = name or f"t{next(_numbers)}"
    where = f"host={server} user={_USER} dbname=postgres"
    with psycopg.connect(where, autocommit=True) as link:
        link.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield f"postgresql+psycopg://{_USER}@/{name}?host={server}"
    with psycopg.connect(where, autocommit=True) as link:
        link.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _known(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
