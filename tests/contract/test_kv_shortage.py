"""What gives way on a real engine when the KV cache runs out while all decode: the lowest tier."""

import concurrent.futures
from typing import Any

import pytest

from scheduler.contracts import frames, requests
from tests.contract import engine_vllm

COMPLETIONS = requests.Endpoint.COMPLETIONS.value
TOKENS = 240
LONGER = 480  # of batch: it begins first, and a busy machine may let it get far ahead


@pytest.fixture(scope="module", params=[engine_vllm.NEWEST, engine_vllm.BEFORE])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> engine_vllm.ForkServer:
    """Return the session's fork server of a vLLM version."""
    return engine_vllm.shared(request, request.param, tmp_path_factory)


def line(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "model": "chat",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def ids_of(found: list[frames.Frame]) -> list[int]:
    return [token for f in found if f.kind is frames.Kind.DATA for token in f.token_ids]


def test_batch_gives_its_blocks_and_the_interactive_answer_is_as_alone(
    server: engine_vllm.ForkServer,
) -> None:
    """Four sequences that need more than the cache: the interactive one, begun last, ends first.

    Without priorities the engine takes the blocks of the newest sequence, which is the interactive one.
    """
    arguments = {**engine_vllm.ARGUMENTS, "kv-cache-memory-bytes": "1M"}
    spec = engine_vllm.spec(
        server.folder, seats=4, reserved_seats=0, max_context=512, engine_args=arguments
    )
    begun = engine_vllm.begin(server, spec)
    replica = engine_vllm.listening(server, begun)
    try:
        alone = ids_of(engine_vllm.ask(replica, COMPLETIONS, line("Go", TOKENS))[0])
        kv = replica.state()["stats"]
        room = kv["kv_blocks"] * kv["kv_block_tokens"]
        assert LONGER < room < 4 * TOKENS, (
            "all four can't reach the interactive one's length together"
        )
        ended: list[str] = []

        def run(name: str, prompt: str, tokens: int, tier: str) -> list[int]:
            found, _ = engine_vllm.ask(replica, COMPLETIONS, line(prompt, tokens), tier=tier)
            ended.append(name)
            return ids_of(found)

        before = replica.state()["stats"]["output_tokens_total"]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            lines = [pool.submit(run, f"b{n}", f"Line {n}", LONGER, "batch") for n in range(3)]
            replica.until(lambda state: state["stats"]["output_tokens_total"] >= before + 30)
            urgent = pool.submit(run, "urgent", "Go", TOKENS, "interactive")
            assert urgent.result(60) == alone
            assert [len(one.result(60)) for one in lines] == [LONGER] * 3
        assert ended[0] == "urgent"
        assert replica.state()["kv_preemptions"] >= 1
    finally:
        engine_vllm.stop(server, begun)
