"""kill -9 of broker, gateway, runner and replica at seeded points: each answer once, token for token equal.

One installation on the embedded Slurm for all seeds. Each job loses every part once, in an order and at
points that its seed says, so five seeds are twenty points.
"""

import dataclasses
import functools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from batch_jobs import model, results
from batch_jobs import store as stores
from scheduler.runtime.registry import database
from tests.integration.whole import batches, processes, running, waiting
from tests.unit.batch_jobs import world

pytestmark = pytest.mark.timeout(300)
LINES = 40
PARTS = ("broker", "gateway", "batchd", "replica")
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 50))]


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """One kill: of which part, after how many answers, and how many seconds later."""

    part: str
    after: int
    later_s: float


@dataclasses.dataclass
class Site:
    """The installation, its jobs as the registry has them, and the answers of an undisturbed run."""

    house: running.Running
    store: stores.Store
    undisturbed: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, kills: Sequence[Kill]) -> tuple[model.BatchJob, list[Any], list[Any]]:
        """Run the file to its end; returns the job, its answers and its failed lines."""
        job_id = waiting.eventually(self._submitted, "a gateway that takes a job")
        for kill in kills:
            waiting.eventually(functools.partial(self._reached, job_id, kill.after), f"{kill}")
            time.sleep(kill.later_s)  # the point lies within a line's tokens, not at their end
            waiting.eventually(functools.partial(self._killed, kill.part), f"{kill.part} to kill")
        job = waiting.eventually(lambda: self._ended(job_id), f"the end of job {job_id}", 150)
        assert job is not None
        good = world.file_lines(self.house.state, job_id, results.OUTPUT)
        return job, good, world.file_lines(self.house.state, job_id, results.ERRORS)

    def _submitted(self) -> int:
        try:
            answer = self.house.client.post(
                self.house.http + batches.JOBS,
                params={"options": "{}"},
                content=data(),
                headers={"Authorization": f"Bearer {self.house.admin_key}"},
            )
        except httpx.ConnectError:
            return 0
        assert answer.is_success, answer.text
        return int(answer.json()["job_id"])

    def _reached(self, job_id: int, answers: int) -> bool:
        job = self.store.get(job_id)
        return job is not None and (job.counts.ok >= answers or job.state.final)

    def _killed(self, part: str) -> bool:
        found = sorted(
            (each for each in self.house.processes() if each.part == part), key=_pid
        )  # a part that was just killed comes back first
        if found:
            found[-1].kill()
        return bool(found)

    def _ended(self, job_id: int) -> model.BatchJob | None:
        job = self.store.get(job_id)
        return job if job is not None and job.state.final else None


def _pid(process: processes.Process) -> int:
    return process.pid


def data() -> bytes:
    """Return a file whose lines differ in length and share nothing."""
    return b"".join(
        world.line(f"c{n}", max_tokens=10 + 13 * n % 90, temperature=0, ignore_eos=True)
        for n in range(LINES)
    )


def answers(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what each line was answered; fails if one stands twice."""
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def site(laptop_house: running.Running) -> Iterator[Site]:
    """An installation that has answered the file once, undisturbed."""
    laptop_house.up()
    store = stores.Store(database.Database(database.sqlite_url(laptop_house.state)))
    made = Site(laptop_house, store)
    job, good, bad = made.run(())
    assert (job.counts.ok, bad) == (LINES, [])
    made.undisturbed = answers(good)
    yield made
    made.store.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_anywhere_answers_are_those_of_a_run_that_nothing_disturbed(
    site: Site, seed: int
) -> None:
    chance = random.Random(seed)
    points = sorted(chance.randrange(LINES) for _ in PARTS)
    # Two kills of one replica could set a line aside as poisonous: each part dies once.
    order = chance.sample(PARTS, len(PARTS))
    kills = [
        Kill(part, after, chance.random() * 0.3) for part, after in zip(order, points, strict=True)
    ]
    job, good, bad = site.run(kills)
    assert bad == []
    assert answers(good) == site.undisturbed
    assert (job.state, job.counts.ok, job.counts.failed) == (model.State.COMPLETED, LINES, 0)
