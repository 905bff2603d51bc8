"""Rankings, classes and missing usage of an external server, as its replica sees them."""

import asyncio
import json
from typing import Any

import pytest

from engines.http import estimate, upstream
from scheduler.contracts import usage
from tests.unit.engines import asgi
from tests.unit.engines.test_http_engine import DONE, OK, Peer, chunk, external, replica

RESULTS = [
    {"index": 1, "document": {"text": "b"}, "relevance_score": 0.9},
    {"index": 0, "document": {"text": "a"}, "relevance_score": 0.1},
]


def answering(value: dict[str, Any]) -> Any:
    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        del body
        raw = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
        peer[1].write(head.encode() + b"\r\nconnection: close\r\n\r\n" + raw)

    return answer


async def post(served: Any, path: str, body: dict[str, Any]) -> asgi.Call:
    return await asgi.run(served, "POST", path, asgi.headers(asgi.identity()), body)


@pytest.mark.parametrize(
    ("wish", "shown"), [({}, True), ({"return_documents": False}, False), ({"top_n": 2}, True)]
)
async def test_documents_are_left_out_where_their_caller_says_so(
    wish: dict[str, Any], shown: bool, sink: usage.MemorySink
) -> None:
    value = {"results": RESULTS, "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    body = {"model": "m", "query": "q", "documents": ["a", "b"], **wish}
    async with external(answering(value)) as url, replica(url, sink) as served:
        call = await post(served, "/v1/rerank", body)
    found = json.loads(call.client_bytes)
    assert [row["relevance_score"] for row in found["results"]] == [0.9, 0.1]
    assert all(("document" in row) is shown for row in found["results"])
    assert (call.end.prompt_tokens, call.end.output_tokens, call.end.estimated) == (9, 0, False)
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.uncached_prompt_tokens, row.reason) == (9, "")


@pytest.mark.parametrize(
    ("path", "body", "answer", "counted"),
    [
        ("/v1/completions", {"prompt": "x" * 41}, {"choices": [{"text": "y" * 9}]}, (11, 3)),
        ("/v1/completions", {"prompt": [1, 2, 3]}, {"choices": [{"text": "y"}]}, (3, 1)),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 8}]}]},
            {"choices": [{"message": {"content": "y" * 8}}]},
            (2, 2),
        ),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, {"data": []}, (3, 0)),
        (
            "/v1/rerank",
            {"query": "q" * 4, "documents": ["d" * 4, "d" * 4]},
            {"results": []},
            (4, 0),
        ),
    ],
)
async def test_usage_that_a_server_does_not_tell_is_estimated_and_marked(
    path: str,
    body: dict[str, Any],
    answer: dict[str, Any],
    counted: tuple[int, int],
    sink: usage.MemorySink,
) -> None:
    async with external(answering(answer)) as url, replica(url, sink) as served:
        call = await post(served, path, {"model": "m", **body})
    assert (call.end.prompt_tokens, call.end.output_tokens) == counted
    assert call.end.estimated
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.outcome, row.reason) == (usage.Outcome.OK, usage.ESTIMATED)
    assert (row.uncached_prompt_tokens, row.output_tokens) == counted


async def test_a_stream_without_usage_counts_its_chunks_and_is_marked(
    sink: usage.MemorySink,
) -> None:
    async def stream(peer: Peer, body: dict[str, Any]) -> None:
        del body
        peer[1].write(OK + b"".join([*map(chunk, "abc"), chunk("", "stop"), DONE]))

    async with external(stream) as url, replica(url, sink) as served:
        call = await asgi.post(served, asgi.identity(), {"prompt": "x" * 8, "stream": True})
    assert (call.end.prompt_tokens, call.end.output_tokens, call.end.estimated) == (2, 3, True)


@pytest.mark.parametrize(
    ("told", "counted", "estimated"),
    [({"total_tokens": 9}, 9, False), ({}, 4, True), ({"prompt_tokens": None}, 4, True)],
)
async def test_usage_without_a_prompt_is_taken_from_the_sum_or_estimated(
    told: dict[str, Any], counted: int, estimated: bool, sink: usage.MemorySink
) -> None:
    """Rankers tell the sum alone: nothing was booked, and nothing marked."""
    body = {"model": "m", "query": "q" * 4, "documents": ["d" * 4, "d" * 4]}
    value = {"results": RESULTS, "usage": told}
    async with external(answering(value)) as url, replica(url, sink) as served:
        call = await post(served, "/v1/rerank", body)
    assert (call.end.prompt_tokens, call.end.estimated) == (counted, estimated)


async def test_the_prompt_of_a_stream_that_breaks_off_is_booked(sink: usage.MemorySink) -> None:
    async def stream(peer: Peer, body: dict[str, Any]) -> None:
        del body
        peer[1].write(OK + b"".join(map(chunk, "abc")))
        await peer[1].drain()
        peer[1].transport.abort()

    async with external(stream) as url, replica(url, sink) as served:
        await asgi.post(served, asgi.identity(), {"prompt": "x" * 8, "stream": True})
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.outcome, row.uncached_prompt_tokens) == (usage.Outcome.REPLICA_LOST, 2)
    assert row.reason.endswith(usage.ESTIMATED)


async def test_a_whole_answer_of_an_external_server_keeps_no_batch_out(
    sink: usage.MemorySink,
) -> None:
    """Its prompt counted as being computed until its end: one caller at a time, and batch had nothing."""
    begun, end = asyncio.Event(), asyncio.Event()
    quick = answering({"choices": [{"text": "y"}]})

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        if body["prompt"] == "slow":
            begun.set()
            await end.wait()
        await quick(peer, body)

    async with external(answer) as url, replica(url, sink) as served:
        person = asyncio.create_task(asgi.post(served, asgi.identity("p"), {"prompt": "slow"}))
        await begun.wait()
        line = await asgi.post(served, asgi.identity("b", "batch"), {"prompt": "x"})
        end.set()
        await person
    assert line.end.output_tokens == 1


async def test_a_class_is_asked_at_the_path_that_servers_have(sink: usage.MemorySink) -> None:
    assert upstream.PATHS == {"/v1/classify": "/classify"}
    value = {"data": [{"index": 0, "probs": [1.0]}], "usage": {"prompt_tokens": 1}}
    async with external(answering(value)) as url, replica(url, sink) as served:
        call = await post(served, "/v1/classify", {"model": "m", "input": "x"})
    assert json.loads(call.client_bytes) == value


def test_a_body_that_is_none_is_estimated_as_nothing() -> None:
    assert estimate.prompt_tokens(b"no") == estimate.prompt_tokens(b"[1]") == 0
    assert estimate.output_tokens([1]) == estimate.output_tokens({"choices": 3}) == 0
