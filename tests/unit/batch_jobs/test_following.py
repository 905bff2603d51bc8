"""A runner's look reads the jobs that have changed, and misses none."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from batch_jobs import following, model
from batch_jobs import store as stores
from scheduler.runtime.registry import database
from tests.unit.batch_jobs import world
from tests.unit.batch_jobs.test_store import draft, nowhere


class Counting(stores.Store):
    """A store that counts the jobs that were read as a whole."""

    read = 0

    def active(self) -> Sequence[model.BatchJob]:
        """Read all, and count them."""
        found = super().active()
        self.read += len(found)
        return found

    def these(self, ids: Sequence[int]) -> Sequence[model.BatchJob]:
        """Read some, and count them."""
        found = super().these(ids)
        self.read += len(found)
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counting]:
    world.open_store(tmp_path).close()
    found = Counting(database.Database(database.sqlite_url(tmp_path)))
    yield found
    found.close()


def test_a_look_reads_what_has_changed_and_nothing_else(store: Counting) -> None:
    for _ in range(40):
        store.add(draft(), nowhere)
    runner = following.Following(store)
    assert runner.look(1)
    assert store.read == 40
    for _ in range(5):
        assert not runner.look(2)
    assert store.read == 40
    store.cancel(7, 99)
    store.add(draft(team="new"), nowhere)
    assert runner.look(3)
    assert store.read == 42
    assert [(job.job_id, job.team) for job in runner.jobs if job.cancel_us or job.team == "new"] == [
        (7, "physics"), (41, "new"),
    ]  # fmt: skip
    assert runner.look(2 + following.WHOLE_US)  # whatever an older gateway has changed unseen
    assert store.read == 42 + 41


CHANGES: dict[str, Callable[[stores.Store, model.BatchJob], object]] = {
    "start": lambda store, job: store.move(job, model.Event.START),
    "counts": lambda store, job: store.tell(job.job_id, counts=model.Counts(total=3, ok=1)),
    "reason": lambda store, job: store.tell(job.job_id, reason="Priority"),
    "update": lambda store, job: store.update(job.job_id, {"priority": job.priority + 1}),
    "expect": lambda store, job: store.expect({job.job_id: job.expected_us + 5}),
    "cancel": lambda store, job: store.cancel(job.job_id, 5),
    "hold": lambda store, job: store.hold(job.job_id, "user"),
    "end": lambda store, job: store.move(job, model.Event.FAIL, ended_us=9),
    "more": lambda store, job: store.add(draft(), nowhere),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_seen(store: Counting, what: str) -> None:
    first = store.add(draft(), nowhere)
    runner = following.Following(store)
    runner.look(1)
    CHANGES[what](store, first)
    assert runner.look(2)
    assert list(runner.jobs) == list(store.active())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_a_look_finds_what_reading_all_would(store: Counting, seed: int) -> None:
    draws = random.Random(seed)
    runner, now = following.Following(store), 1
    for _ in range(120):
        jobs = list(store.active())
        for _ in range(draws.randrange(3)):
            job = store.get(draws.choice(jobs).job_id) if jobs else None
            what = draws.choice(list(CHANGES)) if job is not None else "more"
            if what != "start" or (job is not None and job.state is model.State.PENDING):
                try:
                    CHANGES[what](store, job or draft())
                except model.WrongEvent:
                    continue
        now += draws.choice([1, 1, 1, following.WHOLE_US])
        runner.look(now)
        assert list(runner.jobs) == list(store.active())


def test_the_same_number_of_other_jobs_is_another_mark(store: Counting) -> None:
    job = store.add(draft(), nowhere)
    marks = {store.mark()}
    for _ in range(5):
        store.move(job, model.Event.FAIL)
        job = store.add(draft(), nowhere)
        marks.add(store.mark())
    assert len(marks) == 6
