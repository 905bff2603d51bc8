"""A real vLLM replica before OpenAI's client, and what it says of itself to others."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scheduler.contracts import fleet
from tests.contract import engine_vllm
from tests.contract.vllm_answers import (
    ASK,
    COMPLETIONS,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class TestOpenAiClient:
    """The official client reads plain answers, as an admin's curl gets them."""

    def test_chat_streamed_and_whole_are_equal(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "chat", "messages": ASK, "max_tokens": 12}
        whole = client.chat.completions.create(temperature=0, **asked)
        options: Any = {"include_usage": True}
        stream: Any = client.chat.completions.create(
            temperature=0, stream=True, stream_options=options, **asked
        )
        parts = list(stream)

        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert streamed == whole.choices[0].message.content
        assert parts[-1].choices == []
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 12

    def test_completions_streamed_and_whole_are_equal(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "chat", "prompt": "The water", "max_tokens": 9}
        whole = client.completions.create(temperature=0, **asked)
        parts = list(client.completions.create(temperature=0, stream=True, **asked))

        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        assert parts[-1].choices[0].finish_reason == "length"

    def test_models_are_the_base_and_its_adapters(self, client: openai.OpenAI) -> None:
        names = [model.id for model in client.models.list()]

        assert sorted(names) == ["chat", "chat:formal", "chat:rhyme"]

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"model": "nobody"}, 404),
            ({"max_tokens": 0}, 400),
            ({"prompt": [7] * 2100}, 400),
            ({"temperature": -3}, 400),
            ({"n": "many"}, 400),
        ],
    )
    def test_a_bad_request_is_refused_and_costs_nothing(
        self, replica: engine_vllm.Replica, change: dict[str, Any], status: int
    ) -> None:
        who = engine_vllm.identity(replica, COMPLETIONS)
        body = {"model": "chat", "prompt": "The", "max_tokens": 4, **change}
        with replica.client() as http:
            answer = http.post(COMPLETIONS, json=body, headers=engine_vllm.headers(who))

        assert answer.status_code == status
        assert engine_vllm.strict(answer.content)["error"]["message"]
        row = replica.row(who.request_id)
        assert (row["outcome"], row["output_tokens"]) == ("refused", 0)


def test_the_stats_move_with_the_work(replica: engine_vllm.Replica) -> None:
    before = replica.state()
    engine_vllm.ask(replica, COMPLETIONS, {"model": "chat", "prompt": "The", "max_tokens": 40})
    after = replica.until(lambda state: state["running"] == 0)

    assert after["stats"]["output_tokens_total"] - before["stats"]["output_tokens_total"] == 40
    assert after["steps_total"] - before["steps_total"] >= 40
    assert 0 < after["stats"]["step_ms"] < 1_000
    assert after["stats"]["kv_free"] == after["stats"]["kv_blocks"] > 0
    assert after["stats"]["kv_block_tokens"] == 32
    assert after["stats"]["queued"] == 0
    assert 0 < after["stats"]["ttft_ms"] < 60_000


def test_no_path_answers_without_the_secret(replica: engine_vllm.Replica) -> None:
    with httpx.Client(base_url=replica.url, trust_env=False, verify=False) as http:
        for path in ("/health", "/v1/models", "/metrics", "/forebay/state", "/version", "/docs"):
            assert http.get(path).status_code == 401, path
    with replica.client() as http:
        assert http.get("/health").status_code == 200
        # What vLLM would run without a seat and without a row is not there.
        for path in ("/invocations", "/v1/load_lora_adapter", "/tokenize", "/v1/messages"):
            assert http.post(path, json={}).status_code == 404, path


def test_the_model_folder_is_what_the_tests_think(server: engine_vllm.ForkServer) -> None:
    spec = engine_vllm.spec(server.folder)

    assert spec.engine is fleet.EngineKind.VLLM
    assert Path(spec.weights, "config.json").exists()
