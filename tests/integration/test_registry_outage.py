"""A registry that goes away under load: callers go on, changes are refused, and all of it catches up."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests import endings, realpostgres, services
from tests.bench import models
from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
DOWN_S = 6.0
CLIENTS = 3
PERCENTS = {"v1": 90, "v2": 10}


class Postgres:
    """A PostgreSQL of the test's own, which it stops, freezes and starts again."""

    def __init__(self, folder: Path) -> None:
        found = realpostgres.binaries()
        services.require(found is not None, "PostgreSQL (Debian: apt-get install postgresql)")
        assert found is not None
        self._bin = found
        self.folder = folder
        self._data = folder / "data"
        root = os.geteuid() == 0
        self._user: dict[str, Any] = (
            {"user": "postgres", "group": "postgres", "extra_groups": []} if root else {}
        )
        if root:
            shutil.chown(folder, "postgres")
        self._run("initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "--no-sync")
        self._server: subprocess.Popen[str] | None = None
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"

    def _run(self, name: str, *words: Any) -> None:
        argv = [str(self._bin / name), *map(str, words)]
        subprocess.run(argv, check=True, capture_output=True, cwd=self.folder, **self._user)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        argv = [str(self._bin / "postgres"), "-D", str(self._data), "-F", "-k", str(self.folder)]
        self._server = subprocess.Popen(
            endings.tied("QUIT", [*argv, "-c", "listen_addresses="]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            start_new_session=True,
            **self._user,
        )

        def answers() -> bool:
            with psycopg.connect(host=str(self.folder), user="postgres", dbname="postgres"):
                return True

        waiting.eventually(lambda: _quietly(answers), "PostgreSQL")

    def stop(self) -> None:
        """End it as a crash does: no connection hears a word."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait(30)
            self._server = None

    def signal(self, number: signal.Signals) -> None:
        """Signal it and all of its processes; each of them leads a group of its own."""
        assert self._server is not None
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == self._server.pid:
                    os.kill(int(entry.name), number)

    def listeners(self) -> int:
        """Return how many connections listen for changes of the catalog."""
        where = f"host={self.folder} user=postgres dbname=postgres"
        with psycopg.connect(where) as link:
            row = link.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %'"
            ).fetchone()
        assert row is not None
        return int(row[0])


def _quietly(look: Any) -> bool:
    try:
        return bool(look())
    except psycopg.Error as error:
        raise AssertionError(str(error)) from error


@contextlib.contextmanager
def installed(folder: Path, url: str = "") -> Iterator[running.Running]:
    """Run an installation with one simulated replica, whose model has a second version."""
    scheduler = {"registry_url": url} if url else {}
    model = running.simulated(1)
    # The gateway remembers no key, so that each request asks the store of keys.
    house = running.Running(
        folder, {"client": "embedded"}, scheduler=scheduler, models=model, replicas=1
    )
    try:
        house.up()
        spec = {"engine": "simulated", "seats": running.SEATS, "gpus": 4, "replicas": 0}
        body = {"model": running.MODEL, "name": "v2", "spec": spec}
        house.call("POST", "/admin/catalog/version", body)
        yield house
    except BaseException:
        print(house.log()[-8000:])
        raise
    finally:
        house.close()


def change(house: running.Running, versions: dict[str, int]) -> httpx.Response:
    """Ask for another route."""
    return house.client.patch(
        f"{house.http}/admin/catalog/route",
        json={"model": running.MODEL, "set": {"versions": versions}},
        headers={"Authorization": f"Bearer {house.admin_key}"},
    )


def routed(house: running.Running) -> list[str]:
    """Return the versions that the gateway serves by."""
    (model,) = house.call("GET", "/v1/models")["data"]
    found: list[str] = model["forebay"]["versions"]
    return found


def served(house: running.Running, key: str) -> None:
    """Check that a caller is served."""
    answer = clients.post(house, key, clients.chat(2))
    assert answer.status_code == 200, answer.text


def catches_up(house: running.Running, versions: dict[str, int]) -> None:
    """Check that a change is taken again, and comes to the gateway by itself."""

    def taken() -> bool:
        answer = change(house, versions)
        assert answer.status_code == 200, answer.text
        return True

    waiting.eventually(taken, "a change of the route")
    waiting.eventually(lambda: routed(house) == sorted(versions), "the route at the gateway")


def test_postgresql_is_stopped_and_started_again(tmp_path: Path) -> None:
    server = Postgres(
        Path(tempfile.mkdtemp(prefix="forebay-pg-"))
    )  # a short name: it holds a socket
    server.start()
    try:
        with installed(tmp_path, server.url) as house:
            key, unknown = house.key, "fbk_000000000000_" + "0" * 48
            load = models.Load(house.http, key, CLIENTS)
            load.start()
            catches_up(house, PERCENTS)
            waiting.eventually(lambda: load.asked > 2 * CLIENTS, "callers")
            served(house, key)
            assert server.listeners() == 1

            server.stop()
            asked, until = load.asked, time.monotonic() + DOWN_S
            while time.monotonic() < until:
                answer = change(house, {"v1": 100})
                assert answer.status_code == 503, answer.text
                assert "registry does not answer: nothing was changed" in answer.text
                assert int(answer.headers["retry-after"]) > 0
                refused = clients.post(house, unknown, clients.chat(2))
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
                assert routed(house) == sorted(PERCENTS)
                served(house, key)
            assert load.asked > asked

            server.start()
            catches_up(house, {"v1": 100})
            waiting.eventually(lambda: server.listeners() == 1, "the broker's LISTEN")
            assert clients.post(house, unknown, clients.chat(2)).status_code == 401

            # As a host that has stopped: connections stay open, and nothing is ever answered.
            server.signal(signal.SIGSTOP)
            try:
                asked, until = load.asked, time.monotonic() + DOWN_S
                while time.monotonic() < until:
                    served(house, key)
                assert load.asked > asked
            finally:
                server.signal(signal.SIGCONT)
            catches_up(house, PERCENTS)
            load.stop()
            assert load.failures == []
            catches_up(house, {"v1": 100})
            waiting.eventually(lambda: house.attempts(outcome="open") == [], "rows of all requests")
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


def test_sqlite_is_locked_by_somebody(tmp_path: Path) -> None:
    """A backup, or an admin's shell, that holds the lock: reading goes on, and a change waits its turn."""
    with installed(tmp_path) as house:
        load = models.Load(house.http, house.key, CLIENTS)
        load.start()
        catches_up(house, PERCENTS)
        waiting.eventually(lambda: load.asked > 2 * CLIENTS, "callers")
        holder = sqlite3.connect(house.state / "registry.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        found: list[httpx.Response] = []
        waiter = threading.Thread(target=lambda: found.append(change(house, {"v1": 100})))
        waiter.start()
        asked, until = load.asked, time.monotonic() + DOWN_S
        while time.monotonic() < until:
            served(house, house.key)
            assert house.call("GET", "/admin/catalog")["revision"] > 0
        assert load.asked > asked
        assert (found, routed(house)) == ([], sorted(PERCENTS))
        holder.execute("ROLLBACK")
        holder.close()
        waiter.join(60)
        (answer,) = found
        assert answer.status_code == 200, answer.text
        waiting.eventually(lambda: routed(house) == ["v1"], "the route at the gateway")
        load.stop()
        assert load.failures == []
