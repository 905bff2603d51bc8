"""kill -9 of the batch runner at seeded points: every custom_id stands exactly once in the results."""

import asyncio
import collections
import contextlib
import json
import random
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from batch_jobs import model, results
from tests.unit.batch_jobs import world

LINES = 64


def start(state_dir: Path, url: str, job_id: int) -> ForkServerProcess:
    process = world.PROCESSES.Process(
        target=world.run_until_done, args=(str(state_dir), url, job_id)
    )
    process.start()
    return process


async def finished(process: ForkServerProcess, seconds: float) -> bool:
    """Wait for a process, at most so long."""
    await asyncio.to_thread(process.join, seconds)
    return process.exitcode is not None


async def kill(process: ForkServerProcess) -> None:
    process.kill()
    assert await finished(process, 10)


class Killer:
    """Kills the runner when the gateway has seen so many requests, before or after the answer."""

    def __init__(self, at: int, *, before: bool) -> None:
        self.at = at
        self.before = before
        self.seen = 0
        self.reached = asyncio.Event()
        self.never = asyncio.Event()

    async def __call__(self, custom_id: str) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.reached.set()
        if self.seen >= self.at and self.before:
            await self.never.wait()


SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 200))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_killed_anywhere_nothing_is_lost_and_nothing_comes_twice(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    store = world.open_store(tmp_path)
    async with world.ScriptedGateway().running() as gateway:
        too_long = set()
        for number in chance.sample(range(1, LINES + 1), 12):
            kind = chance.choice((world.SHED, world.PREEMPTED, world.CUT, world.TOO_LONG))
            if kind is world.TOO_LONG:
                too_long.add(f"c{number}")
            gateway.script[f"c{number}"] = [kind]
        order = chance.choice(("input", "completion"))
        api = world.AppApi(store, tmp_path)
        data = world.many(LINES) + b"not json\n"
        job_id = await asyncio.to_thread(api.submit, data, order=order)
        for _ in range(chance.randint(1, 3)):
            killer = Killer(chance.randint(1, LINES + 8), before=chance.random() < 0.5)
            gateway.before = killer
            process = start(tmp_path, gateway.url, job_id)
            # Past the last request the kill falls into sealing and publishing.
            reached = asyncio.create_task(killer.reached.wait())
            ended = asyncio.create_task(finished(process, 20))
            await asyncio.wait({reached, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not killer.before:
                await finished(process, chance.random() * 0.05)
            await kill(process)
            await ended
            reached.cancel()
        gateway.before = None
        last = start(tmp_path, gateway.url, job_id)
        if not store.must(job_id).state.final:
            assert await finished(last, 30)
            assert last.exitcode == 0
        await kill(last)
    job = store.must(job_id)
    good = world.file_lines(tmp_path, job_id, results.OUTPUT)
    bad = world.file_lines(tmp_path, job_id, results.ERRORS)
    ids = collections.Counter(line["custom_id"] for line in [*good, *bad])
    assert ids == collections.Counter([*(f"c{n}" for n in range(1, LINES + 1)), None])
    assert job.state is model.State.COMPLETED
    assert (job.counts.ok, job.counts.failed) == (len(good), len(bad))
    for row in good:  # as in a run that nothing disturbed: each line has the answer to itself
        assert row["response"]["body"]["choices"][0]["message"]["content"] == row["custom_id"]
    refused = {row["custom_id"] for row in bad if row["custom_id"] is not None}
    assert refused <= too_long
    assert {row["error"]["code"] for row in bad if row["custom_id"] is not None} <= {
        world.TOO_LONG.code
    }
    if order == "input":
        numbers = [int(line["custom_id"][1:]) for line in good]
        assert numbers == sorted(numbers)
    store.close()


async def test_b4_killed_at_27_of_64_then_cancelled(tmp_path: Path) -> None:
    """B4: 27 answers stay, 37 lines are batch_cancelled, and the job ends."""
    store = world.open_store(tmp_path)
    async with world.ScriptedGateway().running() as gateway:
        gateway.stuck = {f"c{n}" for n in range(28, LINES + 1)}
        api = world.AppApi(store, tmp_path)
        job_id = await asyncio.to_thread(api.submit, world.many(LINES))
        process = start(tmp_path, gateway.url, job_id)
        while store.must(job_id).counts.ok < 27:
            assert not await finished(process, 0.02)
        await kill(process)
        assert store.must(job_id).counts.ok == 27
        answer = await asyncio.to_thread(api.call, "POST", f"/forebay/v1/jobs/{job_id}/cancel")
        assert answer.json == {"job_id": job_id, "ended": False}
        second = start(tmp_path, gateway.url, job_id)
        assert await finished(second, 30)
    job = store.must(job_id)
    assert job.state is model.State.CANCELLED
    good = world.file_lines(tmp_path, job_id, results.OUTPUT)
    bad = world.file_lines(tmp_path, job_id, results.ERRORS)
    assert len(good) == 27
    assert len(bad) == 37
    assert {line["error"]["code"] for line in bad} == {"batch_cancelled"}
    assert (job.counts.ok, job.counts.failed) == (27, 37)
    store.close()


async def test_two_runners_never_work_on_one_job(tmp_path: Path) -> None:
    store = world.open_store(tmp_path)
    async with world.ScriptedGateway().running() as gateway, contextlib.AsyncExitStack() as stack:
        released = asyncio.Event()

        async def wait(custom_id: str) -> None:
            await released.wait()

        gateway.before = wait
        api = world.AppApi(store, tmp_path)
        job_id = await asyncio.to_thread(api.submit, world.many(LINES))
        for _ in range(2):
            other = world.open_store(tmp_path)
            stack.callback(other.close)
            await stack.enter_async_context(world.daemon_running(other, tmp_path, gateway.url))
        process = start(tmp_path, gateway.url, job_id)
        released.set()
        while not store.must(job_id).state.final:
            await finished(process, 0.02)
        await kill(process)
        assert set(gateway.calls.values()) == {1}
        assert len(gateway.calls) == LINES
    assert len(world.file_lines(tmp_path, job_id, results.OUTPUT)) == LINES
    assert json.dumps(store.must(job_id).public(0))
    store.close()
