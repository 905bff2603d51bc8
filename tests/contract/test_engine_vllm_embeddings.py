"""A real vLLM replica that embeds."""

import asyncio
import base64
import json
import math
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import tinymodel
from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.contract.vllm_answers import (
    end,
    payload,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class TestEmbeddings:
    """The same weights, converted: `--convert embed`."""

    @pytest.fixture
    def embedder(self, server: engine_vllm.ForkServer) -> Iterator[engine_vllm.Replica]:
        arguments = {**engine_vllm.ARGUMENTS, "runner": "pooling", "convert": "embed"}
        spec = engine_vllm.spec(server.folder, model="embed", engine_args=arguments)
        begun = engine_vllm.begin(server, spec)
        yield engine_vllm.listening(server, begun)
        engine_vllm.stop(server, begun)

    def test_base64_and_floats_are_equal(self, embedder: engine_vllm.Replica) -> None:
        """G10: base64 is what SDKs ask for by default; token ids are taken too."""
        inputs: list[Any] = [["The water", "the wheel"], [[101, 102, 103], [104, 105]]]
        for given in inputs:
            body = {"model": "embed", "input": given}
            packed, who = engine_vllm.ask(
                embedder, "/v1/embeddings", {**body, "encoding_format": "base64"}, model="embed"
            )
            plain, _ = engine_vllm.ask(
                embedder, "/v1/embeddings", {**body, "encoding_format": "float"}, model="embed"
            )
            one, other = (engine_vllm.strict(payload(found)) for found in (packed, plain))
            for left, right in zip(one["data"], other["data"], strict=True):
                raw = base64.b64decode(left["embedding"])
                assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(right["embedding"])
            tokens = one["usage"]["prompt_tokens"]
            assert end(packed).prompt_tokens == tokens > 0
            row = embedder.row(who.request_id)
            assert (row["outcome"], row["output_tokens"]) == ("ok", 0)
            assert row["uncached_prompt_tokens"] + row["cached_prompt_tokens"] == tokens
        body = {"model": "embed", "query": TEXTS[0], "documents": TEXTS}
        ranked, _ = engine_vllm.ask(embedder, "/v1/rerank", body, model="embed")
        best = engine_vllm.strict(payload(ranked))["results"][0]
        assert (best["index"], best["document"]["text"]) == (0, TEXTS[0])
        assert best["relevance_score"] == pytest.approx(1.0, abs=1e-3)

    def test_requests_that_come_together_share_steps(self, embedder: engine_vllm.Replica) -> None:
        """None is held back for it: who comes during a step is in the next one (ADR 19)."""
        assert _steps(embedder, "/v1/embeddings", "embed") <= MOST_STEPS

    def test_nan_fails_its_own_input_only(self, server: engine_vllm.ForkServer) -> None:
        """G11: one token's embedding is NaN; whoever has it in their input gets null and the reason."""
        weights = shutil.copytree(engine_vllm.spec(server.folder).weights, server.folder / "nan")
        _spoil(Path(weights) / "model.safetensors", token_id=7)
        arguments = {**engine_vllm.ARGUMENTS, "runner": "pooling", "convert": "embed"}
        spec = engine_vllm.spec(
            server.folder, model="embed", engine_args=arguments, weights=str(weights)
        )
        begun = engine_vllm.begin(server, spec)
        replica = engine_vllm.listening(server, begun)
        for form in ("float", "base64"):
            body = {
                "model": "embed",
                "input": [[101, 102], [103, 7], [104, 105]],
                "encoding_format": form,
            }
            found, _ = engine_vllm.ask(replica, "/v1/embeddings", body, model="embed")
            rows = engine_vllm.strict(payload(found))["data"]
            assert [row["embedding"] is None for row in rows] == [False, True, False]
            assert rows[1]["error"]["code"] == "not_finite"
            alone, _ = engine_vllm.ask(
                replica, "/v1/embeddings", {**body, "input": [[7, 101]]}, model="embed"
            )
            assert frames.Error.parse(alone[-1].payload).status == 400
        engine_vllm.stop(server, begun)


POOLING = {**engine_vllm.ARGUMENTS, "runner": "pooling"}
TEXTS = ["The water falls.", "A stone", "Each morning the same way, each evening back again."]


class TestRankingsAndClasses:
    """Tiny classifiers of our own making, and the embedder as a ranker."""

    def _ask(
        self, server: engine_vllm.ForkServer, labels: list[str], path: str, body: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the answer and the replica's row."""
        weights = server.folder / f"classifier-{len(labels)}"
        tinymodel.make_classifier(weights, labels=labels)
        spec = engine_vllm.spec(
            server.folder,
            model="judge",
            engine_args={**POOLING, "convert": "classify"},
            weights=str(weights),
        )
        begun = engine_vllm.begin(server, spec)
        replica = engine_vllm.listening(server, begun)
        found, who = engine_vllm.ask(replica, path, {"model": "judge", **body}, model="judge")
        value = engine_vllm.strict(payload(found))
        row = replica.row(who.request_id)
        engine_vllm.stop(server, begun)
        assert end(found).prompt_tokens == value["usage"]["prompt_tokens"] > 0
        assert (row["outcome"], row["output_tokens"], row["reason"]) == ("ok", 0, "")
        assert (
            row["uncached_prompt_tokens"] + row["cached_prompt_tokens"]
            == value["usage"]["prompt_tokens"]
        )
        return value, row

    def test_classes_have_labels_and_probabilities(self, server: engine_vllm.ForkServer) -> None:
        value, _ = self._ask(server, ["no", "yes", "maybe"], "/v1/classify", {"input": TEXTS})
        assert [row["index"] for row in value["data"]] == [0, 1, 2]
        for row in value["data"]:
            assert row["num_classes"] == len(row["probs"]) == 3
            assert sum(row["probs"]) == pytest.approx(1.0, abs=1e-3)
            best = max(range(3), key=row["probs"].__getitem__)
            assert row["label"] == ["no", "yes", "maybe"][best]

    def test_requests_for_classes_share_steps_too(self, server: engine_vllm.ForkServer) -> None:
        weights = server.folder / "classifier-shared"
        tinymodel.make_classifier(weights)
        arguments = {**POOLING, "convert": "classify"}
        spec = engine_vllm.spec(
            server.folder, model="judge", engine_args=arguments, weights=str(weights)
        )
        begun = engine_vllm.begin(server, spec)
        replica = engine_vllm.listening(server, begun)
        assert _steps(replica, "/v1/classify", "judge") <= MOST_STEPS
        engine_vllm.stop(server, begun)

    def test_a_ranker_orders_documents_and_leaves_them_out_on_wish(
        self, server: engine_vllm.ForkServer
    ) -> None:
        body = {"query": "What falls?", "documents": TEXTS, "top_n": 2, "return_documents": False}
        value, _ = self._ask(server, ["score"], "/v1/rerank", body)
        scores = [row["relevance_score"] for row in value["results"]]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 2
        assert all(set(row) == {"index", "relevance_score"} for row in value["results"])


ROUNDS, TOGETHER = 4, 8  # as many as a replica has seats
MOST_STEPS = (
    ROUNDS * TOGETHER // 2
)  # were each alone in its steps, it would be twice as many at least


def _steps(replica: engine_vllm.Replica, path: str, model: str) -> int:
    """Return the engine's steps for rounds of one long input and short ones that come meanwhile."""

    async def ask(http: httpx.AsyncClient, given: list[int]) -> None:
        who = engine_vllm.identity(replica, path, model=model)
        body = {"model": model, "input": given}
        answer = await http.post(path, json=body, headers=engine_vllm.headers(who))
        assert answer.status_code == 200, answer.text

    async def rounds() -> None:
        secret = {"Authorization": f"Bearer {engine_vllm.SECRET}"}
        async with httpx.AsyncClient(
            base_url=replica.url, headers=secret, timeout=60, trust_env=False
        ) as http:
            for number in range(ROUNDS):
                long = [100 + (number + n) % 800 for n in range(1500)]
                short = [[100 + number, 200 + n, 300] for n in range(TOGETHER - 1)]
                await asyncio.gather(*(ask(http, given) for given in (long, *short)))

    before = replica.state()["steps_total"]
    asyncio.run(rounds())
    settled = replica.until(lambda state: state["running"] == 0)["steps_total"]
    return int(replica.until(lambda state: state["steps_total"] >= settled)["steps_total"] - before)


def _spoil(file: Path, token_id: int) -> None:
    """Make a token's embedding NaN."""
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    about = json.loads(raw[8 : 8 + size])["model.embed_tokens.weight"]
    start, end = about["data_offsets"]
    width = (end - start) // about["shape"][0]
    at = 8 + size + start + token_id * width
    raw[at : at + 4] = struct.pack("<f", math.nan)
    file.write_bytes(raw)
