"""S9: many writers of one SQLite registry, and writers that are cancelled or killed before they commit."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scheduler.runtime.registry import database, store, tables

SECONDS = 10.0
PROCESSES = 8


def writer(url: str, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.registry_writer", url, *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = database.sqlite_url(tmp_path)
    registry = store.Registry.open(made)
    with registry.database.write() as session:
        session.add(tables.Fact(name="count", at_us=0, body={"n": 0}))
    registry.close()
    return made


def count(registry: store.Registry) -> int:
    fact = registry.journal.fact("count")
    assert fact is not None
    return int(fact.body["n"])


def write_seconds(registry: store.Registry) -> float:
    began = time.monotonic()
    with registry.database.write() as session:
        session.get_one(tables.Fact, "count").at_us += 1
    return time.monotonic() - began


def test_eight_processes_read_then_write_and_none_is_locked_out(url: str) -> None:
    process = writer(url, str(SECONDS), str(PROCESSES))
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    done = [int(line) for line in out.split()]
    assert len(done) == PROCESSES
    registry = store.Registry.open(url, migrate=False)
    assert min(done) > 0
    assert count(registry) == sum(done)  # no update was lost
    registry.close()


async def test_a_task_cancelled_between_write_and_commit_locks_nobody_out(url: str) -> None:
    registry = store.Registry.open(url, migrate=False)
    written, go = threading.Event(), threading.Event()

    def body() -> None:
        with registry.database.write() as session:
            session.get_one(tables.Fact, "count").body = {"n": 1}
            session.flush()
            written.set()
            go.wait()

    task = asyncio.create_task(asyncio.to_thread(body))
    await asyncio.to_thread(written.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(write_seconds, registry) < 0.1
    assert count(registry) == 1  # the transaction was whole: a cancelled caller cuts nothing
    registry.close()


def test_a_body_that_fails_or_a_process_that_is_killed_locks_nobody_out(url: str) -> None:
    registry = store.Registry.open(url, migrate=False)

    def fail() -> None:
        with registry.database.write() as session:
            session.get_one(tables.Fact, "count").body = {"n": 7}
            session.flush()
            raise RuntimeError("before commit")

    with pytest.raises(RuntimeError, match="before commit"):
        fail()
    assert write_seconds(registry) < 0.1
    process = writer(url, "60", "hold")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
    finally:
        process.kill()
        process.communicate()
    assert write_seconds(registry) < 0.1
    assert count(registry) == 0
    registry.close()
