"""The store: what it keeps, how states move, and several processes at once."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import autogenerate
from alembic.runtime import migration

from batch_jobs import model, tables
from batch_jobs import store as stores
from scheduler.runtime.registry import database


def nowhere(job_id: int) -> None:
    assert job_id > 0


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return database.sqlite_url(tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[stores.Store]:
    found = stores.open_store(url)
    yield found
    found.close()


def draft(**fields: object) -> model.BatchJob:
    base: dict[str, object] = {"job_id": 0, "team": "physics", "user": "alice"}
    return model.BatchJob(**{**base, **fields})  # type: ignore[arg-type]  # a test's shorthand


def test_a_job_comes_back_as_it_went_in(store: stores.Store) -> None:
    job = draft(
        uid=1000,
        gid=100,
        order=model.Order.INPUT,
        counts=model.Counts(total=7, failed=1),
        held="user",
    )
    added = store.add(job, nowhere)
    assert added.job_id == 1
    assert store.get(1) == added
    assert store.get(2) is None


def test_ids_count_up_from_1_and_a_failed_placing_undoes_the_insert(store: stores.Store) -> None:
    def refuse(job_id: int) -> None:
        raise OSError("no room")

    assert store.add(draft(), nowhere).job_id == 1
    with pytest.raises(OSError, match="no room"):
        store.add(draft(), refuse)
    second = store.add(draft(), nowhere).job_id
    assert second in {2, 3}  # PostgreSQL's sequences don't go back
    assert [job.job_id for job in store.list()] == [1, second]


def test_a_move_needs_the_state_that_was_seen(store: stores.Store) -> None:
    job = store.add(draft(), nowhere)
    running = store.move(job, model.Event.START, started_us=5)
    assert store.get(1) == running
    with pytest.raises(stores.Stale):
        store.move(job, model.Event.START, started_us=6)
    with pytest.raises(model.WrongEvent):
        store.move(running, model.Event.PUBLISHED)
    assert store.get(1) == running


def test_a_move_leaves_what_others_wrote(store: stores.Store) -> None:
    job = store.add(draft(), nowhere)
    assert store.cancel(1, 77)
    store.move(job, model.Event.START, counts=model.Counts(total=3, ok=1))
    found = store.get(1)
    assert found is not None
    assert (found.cancel_us, found.counts.ok, found.state) == (77, 1, model.State.RUNNING)


def test_cancelling_twice_keeps_the_first_time_and_an_ended_job_says_no(
    store: stores.Store,
) -> None:
    job = store.add(draft(), nowhere)
    assert store.cancel(1, 5)
    assert store.cancel(1, 6)
    found = store.get(1)
    assert found is not None
    assert found.cancel_us == 5
    store.move(job, model.Event.FAIL)
    assert not store.cancel(1, 7)
    assert not store.cancel(99, 7)


def test_only_a_pending_job_is_held(store: stores.Store) -> None:
    job = store.add(draft(), nowhere)
    assert store.hold(1, "user")
    found = store.get(1)
    assert found is not None
    assert found.held == "user"
    assert store.hold(1, "")
    store.move(job, model.Event.START)
    assert not store.hold(1, "user")


def test_counts_of_an_ended_job_stay(store: stores.Store) -> None:
    job = store.add(draft(), nowhere)
    store.tell(1, counts=model.Counts(total=3, ok=1), reason=model.Reason.RESOURCES)
    store.move(job, model.Event.FAIL, reason=model.Reason.LAUNCH_FAILED)
    store.tell(1, counts=model.Counts(total=9, ok=9))
    found = store.get(1)
    assert found is not None
    assert (found.counts.ok, found.reason) == (1, "JobLaunchFailure")


def test_filters(store: stores.Store) -> None:
    for team, user, name in [
        ("a", "u1", "x"),
        ("a", "u2", "y"),
        ("b", "u1", "x"),
        ("007", "u1", "z"),
    ]:
        store.add(draft(team=team, user=user, name=name), nowhere)
    failed = store.get(2)
    assert failed is not None
    store.move(failed, model.Event.FAIL)

    def found(**fields: object) -> list[int]:
        return [job.job_id for job in store.list(stores.Filter(**fields))]  # type: ignore[arg-type]  # shorthand

    assert found() == [1, 2, 3, 4]
    assert found(teams=("a",)) == [1, 2]
    assert found(teams=("a", "b"), users=("u1",)) == [1, 3]
    assert found(names=("z",)) == [4]
    assert found(ids=(2, 4)) == [2, 4]
    assert found(states=(model.State.FAILED,)) == [2]
    assert [job.job_id for job in store.active()] == [1, 3, 4]


def test_the_migrations_make_what_the_code_expects(store: stores.Store, url: str) -> None:
    store.migrate()  # twice is harmless
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        context = migration.MigrationContext.configure(
            connection, opts={"version_table": "batch_jobs_version", "compare_type": True}
        )
        assert autogenerate.compare_metadata(context, tables.METADATA) == []
    engine.dispose()


def test_the_registrys_own_migrations_live_beside_ours(store: stores.Store, url: str) -> None:
    registry = database.Database(url)
    registry.upgrade()
    registry.close()
    store.add(draft(), nowhere)
    assert store.get(1) is not None


def test_s9_a_writer_waits_for_another_instead_of_failing(tmp_path: Path) -> None:
    store = stores.open_store(database.sqlite_url(tmp_path))
    store.add(draft(), nowhere)
    other = sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    done = threading.Event()

    def write() -> None:
        store.cancel(1, 5)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert store.get(1) is not None  # readers don't wait
    assert not done.wait(0.05)
    other.execute("ROLLBACK")
    assert done.wait(10)
    writer.join()
    other.close()
    found = store.get(1)
    assert found is not None
    assert found.cancel_us == 5
    store.close()


def test_s9_a_submission_that_breaks_between_write_and_commit_locks_nobody_out(url: str) -> None:
    store, other = stores.open_store(url), stores.open_store(url)

    def broken_off(job_id: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.add(draft(), broken_off)
    before = time.monotonic()
    assert other.add(draft(user="bob"), nowhere).user == "bob"
    assert time.monotonic() - before < 5  # the busy timeout is 30 s
    assert [job.user for job in store.list()] == ["bob"]
    store.close()
    other.close()
