"""What a look of the runner at the queue costs, where thousands wait."""

from pathlib import Path
from typing import Any, cast

from batch_jobs import daemon, model
from scheduler.contracts import clock
from scheduler.core import batch_order
from tests.unit.batch_jobs import world


class Waiting(model.BatchJob):
    """A job that nobody may compare with another: that costs all its fields, and there are thousands."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("jobs are told apart by their ids")

    def __hash__(self) -> int:
        raise AssertionError("jobs are told apart by their ids")


class Told:
    """A store that is told reasons."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    def tell(self, job_id: int, *, reason: str) -> None:
        self.reasons[job_id] = reason


async def test_jobs_that_wait_are_told_apart_by_their_ids(
    fake_clock: clock.FakeClock, tmp_path: Path, monkeypatch: Any
) -> None:
    store, nothing = Told(), cast("Any", None)
    made = daemon.Daemon(world.QUICK, nothing, cast("Any", store), tmp_path, nothing, fake_clock)
    taken: list[int] = []

    async def take(job: model.BatchJob, now: int) -> bool:
        taken.append(job.job_id)
        return True

    monkeypatch.setattr(made, "_take", take)
    jobs = [Waiting(n, "t", "u", reason=model.Reason.NONE) for n in range(1, 2_001)]
    jobs[7] = Waiting(8, "t", "u", state=model.State.RUNNING)
    made._decision = batch_order.Decision(
        start=(3,), waits={5: batch_order.Wait.PRIORITY}, priority={}
    )
    made._estimated_us = now = fake_clock.wall_us()
    await made._take_some(jobs, jobs, now)
    assert taken == [8, 3]
    assert store.reasons == {5: "Priority"}
