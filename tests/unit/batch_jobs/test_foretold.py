"""Estimates of starts beside what happened: over hours of virtual time, and in what fqueue says of them."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import commands, foretold, model, queueing
from scheduler.contracts import clock, ports
from tests.unit.batch_jobs import world

STEP_S = 20  # the runner looks at least so often, and whenever a job ends
OFF_S = 10
RATE = 100  # tokens a second, all jobs together


@pytest.fixture
def time() -> clock.FakeClock:
    return clock.FakeClock()


@pytest.fixture
def store(tmp_path: Path) -> world.TellingStore:
    return world.open_store(tmp_path)


class Site:
    """A runner in virtual time: starts what the queue says, gives running jobs their tokens, ends them."""

    def __init__(self, store: world.TellingStore, time: clock.FakeClock, truth: float) -> None:
        options = dataclasses.replace(world.QUICK, max_jobs=2, share_half_life_s=1e9)
        self.queue = queueing.Queue(store, options, {})
        self._store = store
        self._time = time
        self._truth = truth  # what jobs take of what is estimated for them

    def submit(self, tokens: int) -> model.BatchJob:
        job = model.BatchJob(
            0,
            "physics",
            "alice",
            submitted_us=self._time.wall_us(),
            queued_tokens=tokens,
            counts=model.Counts(total=100),
        )
        return self._store.add(job, lambda job_id: None)

    async def run(self, until: Any = None) -> None:
        """Go on until all jobs have ended."""
        while jobs := self._store.active():
            now = self._time.wall_us()
            decided = self.queue.decide(jobs, now)
            self.queue.foretell(jobs, now)
            for job in jobs:
                if job.job_id in decided.start:
                    self._store.move(job, model.Event.START, started_us=now)
            if until is not None and until():
                return
            running = [job for job in self._store.active() if job.state is model.State.RUNNING]
            share = RATE / max(1, len(running))
            took_s = min([STEP_S, *(self._left(job) / share for job in running)])
            await self._time.advance(took_s)
            for job in running:
                self._work(job, share * took_s)

    def _left(self, job: model.BatchJob) -> float:
        return self._truth * job.queued_tokens - job.used.output_tokens

    def _work(self, job: model.BatchJob, tokens: float) -> None:
        whole = self._truth * job.queued_tokens
        had = min(whole, job.used.output_tokens + tokens)
        counts = dataclasses.replace(job.counts, ok=int(100 * had / whole))
        used = model.Used(output_tokens=round(had))
        self._store.tell(job.job_id, counts=counts, used=used)
        if had >= whole:
            job = dataclasses.replace(job, counts=counts, used=used)
            job = self._store.move(job, model.Event.DRAINED, counts=counts, used=used)
            self._store.move(job, model.Event.PUBLISHED, ended_us=self._time.wall_us())


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "first_off"), [(1.0, False), (0.3, True)])
async def test_estimates_are_off_by_as_much_as_is_told_and_learn_from_it(
    store: world.TellingStore, time: clock.FakeClock, truth: float, first_off: bool
) -> None:
    """Jobs that take less than their lines allow start earlier than was said, until that is known."""
    site = Site(store, time, truth)
    for _ in range(3):  # the first two tell how fast it goes
        site.submit(20_000)
    await site.run(lambda: store.must(3).state is model.State.RUNNING)
    for _ in range(6):
        site.submit(30_000)
    await site.run()
    first = foretold.error(store.foretold(foretold.LAST))
    assert first.jobs >= 5
    if first_off:
        assert first.within_s > 0.3 * first.ahead_s
        assert first.late_s <= 0
    else:
        assert first.within_s <= 0.1 * first.ahead_s + OFF_S
    for _ in range(8):
        site.submit(30_000)
    await site.run()
    learned = foretold.error(store.foretold(6))
    assert learned.within_s <= 0.1 * learned.ahead_s + OFF_S


def test_the_error_is_that_of_the_first_word_on_jobs_that_have_started(
    store: world.TellingStore, time: clock.FakeClock
) -> None:
    second = 1_000_000
    for late in (-30, 0, 10, 20, 300):
        job = store.add(model.BatchJob(0, "t", "u", submitted_us=second), lambda job_id: None)
        store.update(job.job_id, {"estimated_us": 61 * second, "expected_us": 9_999 * second})
        job = store.must(job.job_id)
        store.move(job, model.Event.START, started_us=(61 + late) * second)
    store.add(model.BatchJob(0, "t", "u", estimated_us=1), lambda job_id: None)
    store.add(model.BatchJob(0, "t", "u", started_us=1), lambda job_id: None)
    found = foretold.error(store.foretold(10))
    assert found == foretold.Error(jobs=5, late_s=10.0, within_s=300.0, ahead_s=60.0)
    assert foretold.words(found.public()) == (
        "The last 5 jobs that were estimated to wait 1:00 (median) started 0:10 later than that, "
        "nine in ten within 5:00."
    )
    assert foretold.error(store.foretold(1)).late_s == 300.0
    assert "nothing tells" in foretold.words(foretold.error(()).public())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_fqueue_start_says_how_far_to_trust_it(store: world.TellingStore, tmp_path: Path) -> None:
    api = world.AppApi(store, tmp_path)
    job = store.must(api.submit(world.many(1)))
    waits = store.must(api.submit(world.many(1)))
    at = job.submitted_us + 60_000_000
    for each in (job, waits):
        store.update(each.job_id, {"estimated_us": at, "expected_us": at})
    store.move(store.must(1), model.Event.START, started_us=at + 12_000_000)
    said = world.run_command("fqueue", ["-h", "-o", "%i %X"], api, tmp_path)
    assert said.out == "1 +0:12\n2 N/A\n"
    assert "started" not in world.run_command("fqueue", ["--start"], api, tmp_path).out
    shown = json.loads(world.run_command("fqueue", ["--start", "--json"], api, tmp_path).out)
    assert shown["estimates"] == {"jobs": 1, "late_s": 12.0, "within_s": 12.0, "ahead_s": 60.0}
    out = Terminal()
    around = {"api": api, "err": io.StringIO(), "env": {"TZ": "UTC"}, "stdin": io.StringIO()}
    assert commands.fqueue(["--start"], out=out, cwd=tmp_path, **around) == 0  # type: ignore[arg-type]
    assert out.getvalue().splitlines()[-1].startswith("The last 1 jobs")

    class Older:  # a gateway that does not know of estimates
        def call(self, *asked: Any, **more: Any) -> ports.ApiResponse:
            return ports.ApiResponse(200, {"jobs": shown["jobs"]}, b"")

    out = Terminal()
    assert commands.fqueue(["--start"], out=out, cwd=tmp_path, **(around | {"api": Older()})) == 0  # type: ignore[arg-type]
    assert len(out.getvalue().splitlines()) == 1 + len(shown["jobs"])


@pytest.mark.parametrize("act", ["hold", "top", "update"])
def test_a_job_that_is_moved_is_estimated_anew(
    store: world.TellingStore, tmp_path: Path, act: str
) -> None:
    api = world.AppApi(store, tmp_path)
    job_id = api.submit(world.many(1))
    store.update(job_id, {"estimated_us": 5})
    url = f"/forebay/v1/jobs/{job_id}"
    if act == "update":
        answer = api.client.patch(url, content=json.dumps({"priority": -5}))
    else:
        answer = api.client.post(f"{url}/{act}")
    assert answer.status_code == 200
    assert store.must(job_id).estimated_us == 0


def test_the_first_estimate_stays_and_a_held_job_gets_none(
    store: world.TellingStore, time: clock.FakeClock
) -> None:
    """A job that is held while estimates are made is not told when it will start."""
    site = Site(store, time, 1.0)
    first, second = site.submit(1000).job_id, site.submit(1000).job_id
    store.expect({first: 5, second: 6})
    store.hold(second, "user")
    store.expect({first: 9, second: 9, 10_000: 9})
    kept = {job.job_id: (job.estimated_us, job.expected_us) for job in store.active()}
    assert kept == {first: (5, 9), second: (0, 6)}
