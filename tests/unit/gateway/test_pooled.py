"""Embeddings, rankings and classes: one shot over HTTP and gRPC, and only where a model has them."""

import asyncio
import base64
import contextlib
import json
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway import asks
from scheduler.contracts import ids, requests, usage
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.unit.gateway import fleets, harness

ANN = (("authorization", "Bearer ann"),)
USED = {"prompt_tokens": 6, "total_tokens": 6}


async def embed(received: harness.Received, out: harness.Out) -> None:
    """Answer with a vector for each input; the second has none."""
    packed = base64.b64encode(struct.pack("<2f", 0.5, -2.0)).decode()
    gone = {"message": "input[1]: the model gives no finite vector for it"}
    rows: list[dict[str, Any]] = [{"index": 0, "embedding": packed}]
    if len(received.body["input"]) > 1:
        rows.append({"index": 1, "embedding": None, "error": gone})
    answer = {"object": "list", "data": rows, "model": "chat", "usage": USED}
    await out.send(harness.data(json.dumps(answer).encode()))
    await out.finish(prompt=6, output=0)


async def told(received: harness.Received, out: harness.Out) -> None:
    await out.send(harness.data(json.dumps({"results": [], "usage": USED}).encode()))
    await out.finish(prompt=6, output=0)


@contextlib.asynccontextmanager
async def routed(script: harness.Script, runner: str) -> AsyncIterator[harness.Served]:
    with tempfile.TemporaryDirectory() as tmp:
        async with harness.FakeReplica(script).listening() as fake:
            view = fleets.make_view([fake.replica(Path(tmp))], runner=runner)
            async with harness.gateway(view) as served:
                yield served


async def post(served: harness.Served, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as session:
        return await session.post(
            served.http + path, json={"model": "chat", **body}, headers=harness.ANN_AUTH
        )


@contextlib.asynccontextmanager
async def stub(served: harness.Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(
        served.grpc, options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        yield forebay_pb2_grpc.InferenceStub(channel)


RERANK = {"query": "water", "documents": ["a river", "a stone"]}


async def test_a_ranking_and_a_class_are_served_and_recorded_without_output() -> None:
    async with routed(told, "classify") as served:
        for path, body in (("/v1/rerank", RERANK), ("/v1/classify", {"input": ["a"]})):
            answer = await post(served, path, **body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"] == USED
        rows = served.closed()
        assert [row.identity.endpoint for row in rows] == ["/v1/rerank", "/v1/classify"]
        assert [(row.uncached_prompt_tokens, row.output_tokens) for row in rows] == [(6, 0)] * 2
        assert {row.outcome for row in rows} == {usage.Outcome.OK}
        await served.idle()


@pytest.mark.parametrize(
    ("runner", "path", "said"),
    [
        (
            "embed",
            "/v1/chat/completions",
            "model 'chat' has no /v1/chat/completions: it is there to embed; "
            "use /v1/embeddings or /v1/rerank",
        ),
        (
            "generate",
            "/v1/embeddings",
            "model 'chat' has no /v1/embeddings: it is there to generate; "
            "use /v1/chat/completions or /v1/completions or /v1/responses",
        ),
        (
            "classify",
            "/v1/embeddings",
            "model 'chat' has no /v1/embeddings: it is there to classify; "
            "use /v1/classify or /v1/rerank",
        ),
    ],
)
async def test_a_model_of_another_kind_is_refused_with_what_it_has(
    runner: str, path: str, said: str
) -> None:
    async with routed(told, runner) as served:
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages} if "chat" in path else {"input": "hi"}
        answer = await post(served, path, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["message"], error["param"]) == (said, "model")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query: must be text, and not empty"),
        ("/v1/rerank", {"query": "a"}, "documents: must be a list of texts, and not empty"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b", 3]},
            "documents[1]: must be text, not a number",
        ),
        ("/v1/rerank", {**RERANK, "top_n": 0}, "top_n: must be at least 1"),
        (
            "/v1/rerank",
            {**RERANK, "return_documents": "no"},
            "return_documents: must be true or false",
        ),
        (
            "/v1/rerank",
            {**RERANK, "top_k": 1},
            "'top_k' is no field of /v1/rerank: did you mean 'top_n'?",
        ),
        (
            "/v1/classify",
            {},
            "input: must be text, token ids, or a list of either, and not empty",
        ),
        (
            "/v1/embeddings",
            {"input": "a", "dimensions": 0},
            "dimensions: must be at least 1",
        ),
    ],
)
async def test_faults_are_named_before_anything_is_spent(
    path: str, body: dict[str, Any], said: str
) -> None:
    async with harness.one_replica(told) as (served, fake):
        answer = await post(served, path, **body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
        assert not fake.received


async def test_grpc_embeds_texts_and_ids() -> None:
    async with harness.one_replica(embed) as (served, fake), stub(served) as api:
        call = api.Embed(
            forebay_pb2.EmbedRequest(
                model="chat", texts=["a", "b"], dimensions=2, priority="standard"
            ),
            metadata=(*ANN, ("x-request-id", "mine")),
        )
        found = await call
        assert list(found.embeddings[0].values) == [0.5, -2.0]
        assert "no finite vector" in found.embeddings[1].error
        assert [each.index for each in found.embeddings] == [0, 1]
        assert found.usage.prompt_tokens == 6
        row = served.closed()[0]
        assert (
            dict(await call.initial_metadata())["x-forebay-request-id"] == row.identity.request_id
        )
        assert (row.identity.caller_request_id, row.identity.tier) == ("mine", "standard")
        assert fake.received[0].path == "/v1/embeddings"
        assert fake.received[0].body == {
            "model": "chat", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2,
        }  # fmt: skip
        many = [forebay_pb2.TokenIds(ids=[1, 2])]
        await api.Embed(forebay_pb2.EmbedRequest(model="chat", token_ids=many), metadata=ANN)
        assert fake.received[1].body["input"] == [[1, 2]]


FAULTS: list[tuple[dict[str, Any], Any, grpc.StatusCode, str]] = [
    ({}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "texts: give either texts or token_ids"),
    ({"texts": ["a"], "deadline_ms": -1}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "deadline_ms"),
    ({"texts": ["a"], "dimensions": 0}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "dimensions"),
    ({"texts": ["a"], "model": "no"}, ANN, grpc.StatusCode.NOT_FOUND, "not known here"),
    ({"texts": ["a"]}, (), grpc.StatusCode.UNAUTHENTICATED, ""),
]


async def test_grpc_names_what_is_wrong() -> None:
    async with harness.one_replica(embed) as (served, fake), stub(served) as api:
        for fields, metadata, status, said in FAULTS:
            asked = forebay_pb2.EmbedRequest(**{"model": "chat", **fields})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await api.Embed(asked, metadata=metadata)
            assert caught.value.code() is status, fields
            assert said in (caught.value.details() or "")
        assert not fake.received


async def test_an_answer_without_embeddings_is_the_engines_fault() -> None:
    async with harness.one_replica(told) as (served, _), stub(served) as api:
        with pytest.raises(grpc.aio.AioRpcError, match="holds no embeddings"):
            await api.Embed(forebay_pb2.EmbedRequest(model="chat", texts=["a"]), metadata=ANN)


async def test_a_lost_replica_is_replaced_and_the_request_begins_anew(tmp_path: Path) -> None:
    asked = 0

    async def dies_once(received: harness.Received, out: harness.Out) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            await embed(received, out)
            return
        await out.send(harness.data(b'{"half'))
        await out.reset()

    async with (
        harness.FakeReplica(dies_once, "r1").listening() as one,
        harness.FakeReplica(dies_once, "r2").listening() as other,
    ):
        view = fleets.make_view([one.replica(tmp_path), other.replica(tmp_path)], runner="embed")
        async with harness.gateway(view) as served, stub(served) as api:
            message = forebay_pb2.EmbedRequest(model="chat", texts=["a"])
            found = await api.Embed(message, metadata=ANN)
            assert list(found.embeddings[0].values) == [0.5, -2.0]
            lost, whole = served.closed()
            assert (lost.outcome, whole.outcome) == (usage.Outcome.REPLICA_LOST, usage.Outcome.OK)
            assert lost.identity.replica_id != whole.identity.replica_id
            assert (whole.identity.attempt, whole.output_tokens) == (2, 0)


def asking(endpoint: requests.Endpoint, body: dict[str, Any]) -> asks.Asking:
    whole = requests.InferenceRequest(
        ids.RequestId("r"), endpoint, body, "chat", requests.Tier.INTERACTIVE, harness.ANN, False, 1
    )
    return asks.of(whole)


def test_a_ranking_is_reckoned_with_its_query_once_for_each_document() -> None:
    body = {"model": "chat", "query": "q" * 10, "documents": ["d" * 20, "d" * 30, "d" * 5]}
    found = asking(requests.Endpoint.RERANK, body)
    assert (found.chars, found.all_chars, found.all_tokens) == (40, 85, 0)


def test_inputs_of_token_ids_are_counted_exactly() -> None:
    found = asking(requests.Endpoint.EMBEDDINGS, {"model": "chat", "input": [[1, 2, 3], [4]]})
    assert (found.prompt_tokens, found.all_tokens, found.seats) == (3, 4, 1)


async def test_whoever_is_sent_away_hears_how_long_a_start_took() -> None:
    for start_s, after in ((0, "5"), (90, "90")):
        view = fleets.make_view([], runner="embed", start_s=start_s)
        async with harness.gateway(view, no_replica_grace_s=0.0) as served:
            answer = await post(served, "/v1/embeddings", input="a")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, after)
            took = ", one took 90 s to start lately" if start_s else ""
            said = f"model chat: no replica is up and none is starting{took}; try again later"
            assert answer.json()["error"]["message"] == said


async def test_a_request_waits_for_a_model_that_waiting_brings_back_from_zero() -> None:
    """Refused at once it would wait nowhere, and nobody would start the model for it."""
    view = fleets.make_view([], runner="embed", start_s=90, wakes=("1",))
    async with harness.gateway(view, no_replica_grace_s=0.0) as served:
        headers = harness.ANN_AUTH | {"X-Forebay-Priority": "interactive"}
        body = {"model": "chat", "input": "a"}
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as session:
            asked = asyncio.create_task(
                session.post(f"{served.http}/v1/embeddings", json=body, headers=headers)
            )
            await harness.until(served.waiting)
            asked.cancel()
            await asyncio.wait({asked})
    async with harness.gateway(view, no_replica_grace_s=0.0, deadline_interactive_s=0.2) as served:
        answer = await post(served, "/v1/embeddings", input="a")
        assert (answer.status_code, answer.headers["retry-after"]) == (504, "90")
        assert answer.json()["error"]["message"] == (
            "model chat: no replica was up before the deadline passed, one took 90 s to start lately; "
            "ask again, or give it more time"
        )


async def test_nobody_waits_for_a_version_that_waiting_does_not_bring_back() -> None:
    """One in quarantine beside another that may start: pinned to it a request waited in vain."""
    view = fleets.make_view([], runner="embed", wakes=("1",), weights={"1": 50, "2": 50})
    async with harness.gateway(view, no_replica_grace_s=0.0) as served:
        answer = await post(served, "/v1/embeddings", input="a", forebay_version="2")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
