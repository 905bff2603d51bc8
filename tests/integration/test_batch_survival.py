"""kill -9 of gateway, replica and runner at seeded points: each answer once, and token for token the same."""

import asyncio
import json
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import model, results
from tests.integration import batch_site
from tests.unit.batch_jobs import world

LINES = 24
SCALE = 0.05  # of the simulated engine's own pace
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 200))]


def data() -> bytes:
    return b"".join(
        world.line(f"c{n}", max_tokens=20 + 37 * n % 280, temperature=0, ignore_eos=True)
        for n in range(LINES)
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def run(
    folder: Path, kills: Sequence[tuple[str, int, float]], scale: float
) -> tuple[model.BatchJob, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the file; each kill is of a part, after so many answers, and so many seconds later."""
    store = world.open_store(folder)
    job_id = await asyncio.to_thread(world.AppApi(store, folder).submit, data())
    parts = batch_site.Parts(folder, free_port(), job_id, scale)
    try:
        for part in ("replica", "gateway", "runner"):
            parts.start(part)
        for part, after, later_s in kills:
            async with asyncio.timeout(150):
                while True:
                    job = store.must(job_id)
                    if job.counts.ok >= after or job.state.final:
                        break
                    await asyncio.sleep(0.01)
            await asyncio.sleep(later_s)
            await parts.kill(part)
            parts.start(part)
        async with asyncio.timeout(150):
            while not store.must(job_id).state.final:  # noqa: ASYNC110 - another process ends it
                await asyncio.sleep(0.02)
        return (
            store.must(job_id),
            world.file_lines(folder, job_id, results.OUTPUT),
            world.file_lines(folder, job_id, results.ERRORS),
        )
    finally:
        await parts.close()
        store.close()


def answers(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job, good, bad = asyncio.run(run(tmp_path_factory.mktemp("undisturbed"), (), 0.0))
    assert (job.counts.ok, bad) == (LINES, [])
    return answers(good)


@pytest.mark.parametrize("seed", SEEDS)
async def test_killed_anywhere_answers_are_those_of_a_run_that_nothing_disturbed(
    tmp_path: Path, undisturbed: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    victims = ["replica", "gateway", "runner"]
    chance.shuffle(victims)
    # Two kills of one replica could set a line aside as poisonous: each part dies once at most.
    kills = [
        (victim, chance.randrange(LINES), chance.random() * 0.1)
        for victim in victims[: chance.randint(1, 3)]
    ]
    job, good, bad = await run(tmp_path, kills, SCALE)
    assert bad == [], json.dumps(bad[0])
    assert len(good) == LINES
    assert answers(good) == undisturbed
    assert (job.state, job.counts.ok) == (model.State.COMPLETED, LINES)
