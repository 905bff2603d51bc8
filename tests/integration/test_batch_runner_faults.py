"""The batch runner among faults: full disks, files that rot or are gone, a registry that is away."""

import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.exc

from batch_jobs import finishing, intake, journal, journal_writer, lines, model, results, runner
from batch_jobs import store as stores
from tests.integration import batch_stage
from tests.unit.batch_jobs import world

stage = batch_stage.stage  # the fixture


async def test_a_job_whose_file_is_gone_fails_and_says_so(stage: batch_stage.Stage) -> None:
    job_id = await stage.submit(world.many(2))
    (intake.job_folder(stage.state_dir, job_id) / results.INPUT).unlink()
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        job = await stage.store.ended(job_id)
    assert job.state is model.State.FAILED
    assert job.reason == model.Reason.LAUNCH_FAILED
    assert "gone" in job.detail


async def test_a_full_disk_stops_dispatch_and_loses_nothing(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_RETRY_S", 0.01)
    real, refusals = journal_writer.Writer.commit, iter(range(20))

    def commit(writer: journal_writer.Writer) -> None:
        if stage.gateway.calls and next(refusals, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(writer)

    monkeypatch.setattr(journal_writer.Writer, "commit", commit)
    job = await stage.run(world.many(50))
    assert next(refusals, None) is None
    assert job.counts == model.Counts(total=50, ok=50)
    assert set(stage.gateway.calls.values()) == {1}
    assert len(stage.output(1)) == 50


async def test_a_file_that_can_not_be_read_now_holds_up_its_own_job_alone(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_RETRY_S", 0.01)
    real, refusals = results.read_input, iter(range(4))

    def read(path: Path, *args: Any) -> Iterator[lines.RawLine]:
        for raw in real(path, *args):
            if path.parent.name == "1" and raw.number % 3 == 0 and next(refusals, None) is not None:
                raise OSError(errno.EIO, "Input/output error")
            yield raw

    monkeypatch.setattr(results, "read_input", read)
    first = await stage.submit(world.many(9))
    other = await stage.submit(world.many(5))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        counts = [(await stage.store.ended(job_id)).counts for job_id in (first, other)]
    assert next(refusals, None) is None
    assert counts == [model.Counts(total=9, ok=9), model.Counts(total=5, ok=5)]
    assert sum(stage.gateway.calls.values()) == 14


async def test_a_journal_that_can_not_be_opened_now_keeps_the_job_waiting(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = runner.open_journal, iter(range(3))

    def refuse(job: model.BatchJob, folder: Path) -> journal_writer.Writer:
        if next(refusals, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(job, folder)

    monkeypatch.setattr(runner, "open_journal", refuse)
    job = await stage.run(world.many(3))
    assert next(refusals, None) is None
    assert job.counts == model.Counts(total=3, ok=3)


async def test_a_job_that_could_not_be_started_lets_go_of_its_journal(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter(range(2))

    def move(job: model.BatchJob, event: model.Event, **changes: Any) -> model.BatchJob:
        if event is model.Event.START and next(refusals, None) is not None:
            raise sqlalchemy.exc.OperationalError("update", {}, Exception("registry is down"))
        return real_move(job, event, **changes)

    real_move = stage.store.move
    monkeypatch.setattr(stage.store, "move", move)
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        job = await stage.store.ended(await stage.submit(world.many(3)))
    assert next(refusals, None) is None
    assert job.counts == model.Counts(total=3, ok=3)


async def test_a_move_whose_answer_was_lost_is_not_made_twice(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry's connection breaks behind each commit: the runner ended over the second try."""
    lost: list[model.Event] = []

    def move(job: model.BatchJob, event: model.Event, **changes: Any) -> model.BatchJob:
        moved = real_move(job, event, **changes)
        if event not in lost:
            lost.append(event)
            raise sqlalchemy.exc.OperationalError("update", {}, Exception("connection lost"))
        return moved

    real_move = stage.store.move
    monkeypatch.setattr(stage.store, "move", move)
    monkeypatch.setattr(finishing, "_AGAIN_S", 0.01)
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url) as task:
        job = await stage.store.ended(await stage.submit(world.many(3)))
        other = await stage.store.ended(await stage.submit(world.many(2)))
        assert not task.done()
    assert lost == [model.Event.START, model.Event.DRAINED, model.Event.PUBLISHED]
    assert (job.counts.ok, other.counts.ok) == (3, 2)


async def test_a_job_whose_refusals_rot_holds_up_no_other(stage: batch_stage.Stage) -> None:
    bad = await stage.submit(world.many(2) + b"no json\n")
    (intake.job_folder(stage.state_dir, bad) / intake.REJECTS).write_bytes(b'{"number": 1')
    good = await stage.submit(world.many(3))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        rotten, done = [await stage.store.ended(job_id) for job_id in (bad, good)]
    assert (rotten.state, rotten.reason) == (model.State.FAILED, model.Reason.LAUNCH_FAILED)
    assert f"{intake.REJECTS} is damaged" in rotten.detail
    assert done.counts == model.Counts(total=3, ok=3)


async def test_a_journal_that_rots_before_it_is_published_fails_the_job(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotten(*args: object) -> results.Built:
        raise journal.JournalError("the journal is damaged at byte 99")

    monkeypatch.setattr(results, "build", rotten)
    job = await stage.run(world.many(3))
    assert (job.state, job.reason) == (model.State.FAILED, model.Reason.LAUNCH_FAILED)
    assert job.detail == "the journal is damaged at byte 99"


async def test_running_jobs_go_on_while_the_registry_is_down(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter(range(10))

    def down() -> None:
        if stage.gateway.calls and next(refusals, None) is not None:
            raise sqlalchemy.exc.OperationalError("select", {}, Exception("registry is down"))

    def mark() -> stores.Mark:
        down()
        return real_mark()

    def move(job: model.BatchJob, event: model.Event, **changes: Any) -> model.BatchJob:
        down()
        return real_move(job, event, **changes)

    real_mark, real_move = stage.store.mark, stage.store.move
    monkeypatch.setattr(stage.store, "mark", mark)
    monkeypatch.setattr(stage.store, "move", move)
    monkeypatch.setattr(finishing, "_AGAIN_S", 0.01)
    job = await stage.run(world.many(50))
    assert next(refusals, None) is None
    assert job.state is model.State.COMPLETED
    assert job.counts.ok == 50


async def test_e6_the_sites_proxy_is_not_for_the_gateway(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    job = await stage.run(world.many(5))
    assert job.counts.ok == 5


async def test_a_gateway_that_is_away_costs_no_line(stage: batch_stage.Stage) -> None:
    job_id = await stage.submit(world.many(5))
    async with world.daemon_running(stage.store, stage.state_dir, "http://127.0.0.1:1"):
        job = await stage.store.until(job_id, lambda job: job.reason == model.Reason.RESOURCES)
        assert job.state is model.State.RUNNING
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        job = await stage.store.ended(job_id)
    assert job.counts == model.Counts(total=5, ok=5)


async def test_a_job_that_ended_since_the_look_is_left_alone(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look's list is older than the end of a run: the job must not be ended a second time."""
    job = await stage.run(world.many(3))
    stale = dataclasses.replace(job, state=model.State.COMPLETING, ended_us=0)
    looks = stage.store.active
    monkeypatch.setattr(stage.store, "active", lambda: [stale, *looks()])
    second = await stage.run(world.many(3))
    assert second.state is model.State.COMPLETED
    assert stage.store.must(job.job_id) == job
