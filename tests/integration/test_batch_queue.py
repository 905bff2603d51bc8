"""The queue at work: who starts when, what is put back, answers as they come, and as Parquet."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batch_jobs import daemon, dependencies, intake, model, parquet, results
from scheduler.contracts import clock
from tests.integration import batch_stage
from tests.unit.batch_jobs import world

stage = batch_stage.stage  # the fixture


def lines(prefix: str, count: int) -> bytes:
    return b"".join(world.line(f"{prefix}{n}") for n in range(count))


async def test_jobs_start_when_those_that_they_wait_for_have_ended(
    stage: batch_stage.Stage,
) -> None:
    order: list[str] = []

    async def note(custom_id: str) -> None:
        order.append(custom_id[0])

    stage.gateway.before = note
    stage.gateway.script["b0"] = [world.TOO_LONG]
    first = await stage.submit(lines("a", 3))
    bad = await stage.submit(lines("b", 1), dependency=f"afterok:{first}")
    never = await stage.submit(lines("c", 1), dependency=f"afterok:{bad}")
    anyhow = await stage.submit(lines("d", 1), dependency=f"afternotok:{bad}")
    either = await stage.submit(lines("e", 1), dependency=f"afterok:{bad}?afterany:{anyhow}")
    async with stage.runner():
        await stage.store.ended(either)
        await stage.store.until(never, lambda job: job.reason == model.Reason.NEVER)
        assert stage.store.must(never).state is model.State.PENDING
        assert stage.store.cancel(never, 1)
        assert (await stage.store.ended(never)).state is model.State.CANCELLED
    assert "".join(order) == "aaabde"


async def test_a_job_waits_for_one_of_slurms(stage: batch_stage.Stage) -> None:
    standing = {4711: dependencies.Fate.RUNNING}
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fates(ids: Any) -> dict[int, dependencies.Fate]:
        loop.call_soon_threadsafe(asked.set)
        return {each: standing[each] for each in ids}

    job_id = await stage.submit(lines("a", 1), dependency="afterok:slurm:4711")
    task = asyncio.create_task(
        daemon.serve(
            world.QUICK,
            store=stage.store,
            state_dir=stage.state_dir,
            gateway_url=stage.gateway.url,
            service_key="service",
            clock=clock.SystemClock(),
            slurm=fates,
        )
    )
    await stage.store.until(job_id, lambda job: job.reason == model.Reason.DEPENDENCY)
    await asked.wait()
    standing[4711] = dependencies.Fate.OK
    assert (await stage.store.ended(job_id)).state is model.State.COMPLETED
    task.cancel()
    await asyncio.wait({task})


async def test_an_arrays_tasks_run_within_its_limit(stage: batch_stage.Stage) -> None:
    running: set[str] = set()
    peak = 0

    async def note(custom_id: str) -> None:
        nonlocal peak
        running.add(custom_id[0])
        peak = max(peak, len({j.job_id for j in stage.store.list() if j.state == "RUNNING"}))

    stage.gateway.before = note
    first = await stage.submit(lines("a", 4), array_task=0, array_limit=2)
    ids = [first]
    for task in (1, 2, 3):
        letter = "abcd"[task]
        ids.append(
            await stage.submit(lines(letter, 4), array_id=first, array_task=task, array_limit=2)
        )
    async with stage.runner():
        for job_id in ids:
            await stage.store.ended(job_id)
    assert peak <= 2
    assert running == set("abcd")


async def test_a_job_that_is_put_back_keeps_what_it_has_and_goes_on(
    stage: batch_stage.Stage,
) -> None:
    stage.gateway.stuck = {f"a{n}" for n in range(5, 10)}
    job_id = await stage.submit(lines("a", 10))
    async with stage.runner():
        await stage.store.until(job_id, lambda job: job.counts.ok == 5)
        await asyncio.to_thread(stage.api.call, "POST", f"/forebay/v1/jobs/{job_id}/requeue")
        await stage.store.until(job_id, lambda job: job.requeues == 1)
        stage.gateway.stuck = set()
        job = await stage.store.ended(job_id)
    assert (job.state, job.counts.ok, job.requeue_us) == (model.State.COMPLETED, 10, 0)
    assert {stage.gateway.calls[f"a{n}"] for n in range(5)} == {1}
    assert len(world.file_lines(stage.state_dir, job_id, results.OUTPUT)) == 10


async def test_one_team_does_not_take_every_line(stage: batch_stage.Stage) -> None:
    seen: list[int] = []

    async def note(custom_id: str) -> None:
        seen.append(stage.gateway.in_flight)

    stage.gateway.before = note
    job_id = await stage.submit(lines("a", 60))
    async with stage.runner(team_lines=3):
        await stage.store.ended(job_id)
    assert max(seen) <= 3


async def test_one_job_at_a_time_runs_by_priority_and_says_why(stage: batch_stage.Stage) -> None:
    order: list[str] = []

    async def note(custom_id: str) -> None:
        order.append(custom_id[0])

    stage.gateway.before = note
    late = await stage.submit(lines("a", 2), priority=-50)
    soon = await stage.submit(lines("b", 2))
    async with stage.runner(max_jobs=1):
        await stage.store.ended(late)
        await stage.store.ended(soon)
    assert "".join(order) == "bbaa"


async def test_answers_are_followed_as_they_come(stage: batch_stage.Stage) -> None:
    stage.gateway.stuck = {"a3"}
    (stage.state_dir / "r.jsonl").write_bytes(lines("a", 4))
    async with stage.runner():
        following = asyncio.create_task(
            asyncio.to_thread(
                world.run_command,
                "fbatch",
                ("--follow", "-Q", "r.jsonl"),
                stage.api,
                stage.state_dir,
            )
        )
        await stage.store.until(1, lambda job: job.counts.ok == 3) if await _there(stage) else None
        stage.store.cancel(1, 1)
        said = await following
    assert said.code == 1
    ids = [json.loads(line)["custom_id"] for line in said.out.splitlines()]
    assert sorted(ids) == ["a0", "a1", "a2"]


async def _there(stage: batch_stage.Stage) -> bool:
    async with asyncio.timeout(30):
        while stage.store.get(1) is None:  # noqa: ASYNC110 - another thread makes it
            await asyncio.sleep(0.01)
    return True


async def test_answers_come_as_parquet(stage: batch_stage.Stage, tmp_path: Path) -> None:
    job_id = await stage.submit(lines("a", 5) + b"bad\n", format="parquet")
    async with stage.runner():
        job = await stage.store.ended(job_id)
    assert job.state is model.State.COMPLETED
    table = pq.read_table(intake.job_folder(stage.state_dir, job_id) / parquet.OUTPUT)
    assert sorted(table["custom_id"].to_pylist()) == [f"a{n}" for n in range(5)]
    assert table["text"].to_pylist() == table["custom_id"].to_pylist()
    assert set(table["status_code"].to_pylist()) == {200}
    answer = stage.api.client.get(f"/forebay/v1/jobs/{job_id}/output")
    assert answer.content[:4] == b"PAR1"
    assert len(world.file_lines(stage.state_dir, job_id, results.ERRORS)) == 1


async def test_cancelled_while_it_is_finalized_a_job_ends_once_with_whole_files(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = results.build

    def late(source: results.Source, ending: model.Ending, order: model.Order) -> results.Built:
        assert stage.store.cancel(source.job_id, 5)
        return build(source, ending, order)

    monkeypatch.setattr(results, "build", late)
    job_id = await stage.submit(lines("a", 7))
    async with stage.runner():
        job = await stage.store.ended(job_id)
    assert (job.state, job.cancel_us) == (model.State.COMPLETED, 5)
    assert len(world.file_lines(stage.state_dir, job_id, results.OUTPUT)) == 7
    assert world.file_lines(stage.state_dir, job_id, results.ERRORS) == []


async def test_several_models_and_adapters_in_one_job_have_windows_of_their_own(
    stage: batch_stage.Stage,
) -> None:
    """One answers none of its lines, and thousands of these stand before the others'."""
    slow = 5_000
    stage.gateway.stuck = {f"s{n}" for n in range(slow)}
    names = ("chat", "chat:poet", "small")
    rows = b"".join(world.line(f"s{n}", model="slow") for n in range(slow)) + b"".join(
        world.line(f"{name}-{n}", model=name) for n in range(20) for name in names
    )
    job_id = await stage.submit(rows)
    async with stage.runner():
        await stage.store.until(job_id, lambda job: job.counts.ok == 60)
        stage.store.cancel(job_id, 1)
        job = await stage.store.ended(job_id)
    assert (job.counts.ok, job.counts.failed) == (60, slow)
