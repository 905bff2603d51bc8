"""What ADR 7 weighs: vLLM's own KV events arrive, and name the prompts whose blocks it holds."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.contracts import fleet
from tests.bench import prefix_events
from tests.bench import prefix_workload as workload
from tests.contract import engine_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long]
BLOCKS = 80


@pytest.fixture
def replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[engine_vllm.Replica, str]]:
    """Yield a replica of 80 blocks, and where it publishes its events."""
    engine_vllm.require(engine_vllm.NEWEST)
    sockets = tempfile.mkdtemp(prefix="kv")  # a socket's path holds 107 characters at most
    monkeypatch.setenv("FOREBAY_BENCH_EVENTS", sockets)
    server = engine_vllm.ForkServer(engine_vllm.NEWEST, tmp_path, "tests.bench.prefix_forkserver")
    try:
        spec: fleet.ReplicaSpec = engine_vllm.spec(
            tmp_path,
            engine_args={
                **engine_vllm.ARGUMENTS,
                "kv-cache-memory-bytes": BLOCKS * workload.BLOCK_BYTES,
            },
        )
        made = engine_vllm.listening(server, engine_vllm.begin(server, spec))
        yield made, f"ipc://{sockets}/{made.pid}"
    finally:
        server.close()
        shutil.rmtree(sockets, ignore_errors=True)


async def test_events_name_the_prompts_that_are_cached(
    replica: tuple[engine_vllm.Replica, str],
) -> None:
    made, endpoint = replica
    blocks = prefix_events.Blocks()
    listening = asyncio.create_task(prefix_events.listen(endpoint, blocks))
    texts = ["".join(workload.block_text(talk * 100 + n) for n in range(20)) for talk in range(5)]
    ids = [workload.token_ids(text) for text in texts]
    size = workload.BLOCK_TOKENS

    async def ask(text: str) -> None:
        body = {"model": "chat", "prompt": text, "max_tokens": 1}
        await asyncio.to_thread(engine_vllm.ask, made, "/v1/completions", body)

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - what it waits for rings no bell
                await asyncio.sleep(0.05)

    try:
        await asyncio.sleep(0.5)  # a subscriber that has just connected misses what was said before
        await ask(texts[0])
        await until(lambda: blocks.held(ids[0], size) == len(ids[0]))
        assert blocks.held(ids[1], size) == 0
        for text in texts[1:]:
            await ask(text)
        await until(lambda: blocks.held(ids[4], size) == len(ids[4]))
        await until(lambda: blocks.held(ids[0], size) < len(ids[0]))  # evicted for the others
        assert len(blocks) <= BLOCKS
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
