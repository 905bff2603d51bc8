"""A gRPC call ends, and gives its place back, whether its client reads or not."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import grpc

from gateway import grpc_endings, grpc_server
from scheduler.contracts import usage
from scheduler.contracts.v1 import forebay_pb2
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.test_grpc import ANN, chat, stub

SHORT: dict[str, Any] = {"client_stall_s": 0.1, "body_bytes_per_s": 2**40, "grpc_calls": 1}


async def place_comes_back(served: harness.Served) -> None:
    """Ask for the one place that there is until it is nobody's."""
    asked = grpc.StatusCode.RESOURCE_EXHAUSTED
    async with asyncio.timeout(20):
        while asked is grpc.StatusCode.RESOURCE_EXHAUSTED:
            async with stub(served) as api:
                asked = await api.ListModels(forebay_pb2.ListModelsRequest(), metadata=ANN).code()
    assert asked is grpc.StatusCode.OK


async def test_who_reads_nothing_of_a_stream_keeps_no_place() -> None:
    """Its request ended and its seat was free, but the call waited for ever to be told so."""

    async def floods(received: harness.Received, out: harness.Out) -> None:
        frame = harness.data(harness.chat_event({"content": "x" * 100_000}), 1)
        while not out.left.done():
            await out.send(frame)
        await out.gone()

    async with harness.one_replica(floods, **SHORT) as (served, _), stub(served) as api:
        call = api.Generate(chat(), metadata=ANN)
        await call.initial_metadata()
        (row,) = await served.rows(1)
        assert row.outcome is usage.Outcome.CANCELLED
        assert "not read" in row.reason
        await served.idle()
        await place_comes_back(served)
        call.cancel()


async def test_who_reads_nothing_of_a_whole_answer_keeps_no_place(tmp_path: Path) -> None:
    packed = base64.b64encode(b"0" * 12_000_000).decode()
    answer = {"object": "list", "data": [{"index": 0, "embedding": packed}]}

    async def embeds(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(json.dumps(answer).encode()))
        await out.finish(output=0)

    async with (
        harness.FakeReplica(embeds).listening() as fake,
        harness.gateway(
            fleets.make_view([fake.replica(tmp_path)], runner="embed"), **SHORT
        ) as served,
        grpc.aio.insecure_channel(served.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        # As a stream's caller, who is not sent more than it asks for.
        asks: Any = channel.unary_stream(f"/{grpc_server.SERVICE}/Embed")
        message = forebay_pb2.EmbedRequest(model="chat", texts=["a"])
        call = asks(message.SerializeToString(), metadata=ANN)
        await call.initial_metadata()
        (row,) = await served.rows(1)
        assert row.outcome is usage.Outcome.OK
        await place_comes_back(served)
        call.cancel()


async def test_a_call_that_is_over_is_left_alone() -> None:
    async with harness.one_replica(harness.hello, **SHORT) as (served, _), stub(served) as api:
        for _ in range(3):
            chunks = [chunk async for chunk in api.Generate(chat(), metadata=ANN)]
            assert "".join(chunk.text for chunk in chunks) == "Hello world"


async def test_a_task_that_answers_no_call_has_no_keeper() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    other = asyncio.create_task(asyncio.wait({task}))
    await asyncio.sleep(0)
    assert grpc_endings._keeper(task) is None
    task.cancel()
    await other
