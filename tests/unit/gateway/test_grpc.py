"""The gRPC interface: chunks, errors, cancellation, reflection and health."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway import grpc_server
from scheduler.contracts import errors, fleet, frames, requests, usage
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.unit.gateway import fleets, harness

ANN = (("authorization", "Bearer ann"),)
BOB = (("authorization", "Bearer bob"),)


@contextlib.asynccontextmanager
async def stub(served: harness.Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(
        served.grpc, options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        yield forebay_pb2_grpc.InferenceStub(channel)


def chat(**changes: Any) -> forebay_pb2.GenerateRequest:
    fields = {
        "model": "chat",
        "max_tokens": 8,
        "messages": [forebay_pb2.Message(role="user", content="hi")],
        **changes,
    }
    return forebay_pb2.GenerateRequest(**fields)


async def test_generate_streams_text_ids_and_usage() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), stub(served) as api:
        call = api.Generate(
            chat(temperature=0.7, seed=5, stop=["x"], priority="standard", cache_hint="k"),
            metadata=(*ANN, ("x-request-id", "mine")),
        )
        metadata = dict(await call.initial_metadata())
        chunks = [chunk async for chunk in call]
        assert "".join(chunk.text for chunk in chunks) == "Hello world"
        assert [i for chunk in chunks for i in chunk.token_ids] == [7, 8, 9]
        assert [c.finish_reason for c in chunks if c.HasField("finish_reason")] == ["stop"]
        used = chunks[-1].usage
        assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (5, 0, 3)
        row = served.closed()[0]
        assert metadata["x-forebay-request-id"] == row.identity.request_id
        assert (row.identity.caller_request_id, row.identity.tier) == ("mine", "standard")
        body = fake.received[0].body
        assert body["temperature"] == 0.7  # the caller's digits, not a float32's
        assert (body["seed"], body["stop"], body["stream"]) == (5, ["x"], True)


async def test_prompt_version_and_adapter() -> None:
    async def complete(received: harness.Received, out: harness.Out) -> None:
        event = (
            b'data: {"choices": [{"index": 0, "text": "na\xc3\xafve", "finish_reason": "length"}]}'
        )
        await out.send(harness.data(event + b"\n\n", 7), harness.DONE)
        await out.finish()

    async with harness.one_replica(complete) as (served, fake), stub(served) as api:
        asked = forebay_pb2.GenerateRequest(
            model="chat", prompt="a", max_tokens=1, version="1", adapter="poet"
        )
        chunks = [chunk async for chunk in api.Generate(asked, metadata=ANN)]
        assert (chunks[0].text, chunks[0].finish_reason) == ("naïve", "length")
        assert fake.received[0].path == "/v1/completions"
        assert fake.received[0].body["model"] == "poet"
        assert served.closed()[0].identity.version == "1"


FAULTS: list[tuple[dict[str, Any], Any, grpc.StatusCode, str]] = [
    ({"model": "nope"}, ANN, grpc.StatusCode.NOT_FOUND, "model_not_found"),
    ({"adapter": "nope"}, ANN, grpc.StatusCode.NOT_FOUND, "model_not_found"),
    ({"version": "9"}, ANN, grpc.StatusCode.NOT_FOUND, "model_not_found"),
    ({"max_tokens": 0}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"prompt": "both"}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"messages": []}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"temperature": 9.0}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"priority": "urgent"}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"deadline_ms": -1}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"deadline_ms": 2**62}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"cache_hint": "x" * 999}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"version": "x" * 999}, ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
    ({"priority": "batch"}, BOB, grpc.StatusCode.PERMISSION_DENIED, "forbidden"),
    ({}, (), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
    ({}, (("authorization", "Bearer x"),), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
]


async def test_errors_have_the_documented_status() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), stub(served) as api:
        for changes, metadata, status, code in FAULTS:
            call = api.Generate(chat(**changes), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is status, changes
            assert dict(caught.value.trailing_metadata() or ())["x-forebay-code"] == code
        assert not fake.received


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xfe", b"\x0a\x7fcut"])
@pytest.mark.parametrize("method", ["Generate", "Cancel"])
async def test_bad_utf8_and_cut_messages_are_the_callers_fault(method: str, raw: bytes) -> None:
    async with (
        harness.one_replica(harness.hello) as (served, fake),
        grpc.aio.insecure_channel(served.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        call: Any = channel.unary_stream(f"/{grpc_server.SERVICE}/{method}")
        for metadata, status, code in (
            (ANN, grpc.StatusCode.INVALID_ARGUMENT, "bad_request"),
            ((), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(raw, metadata=metadata).read()
            assert caught.value.code() is status
            assert dict(caught.value.trailing_metadata() or ())["x-forebay-code"] == code
        assert not fake.received


async def test_replica_lost_mid_stream_is_unavailable_g1() -> None:
    async def cut(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "a"}), 1))
        await out.reset()

    async with harness.one_replica(cut) as (served, _), stub(served) as api:
        call = api.Generate(chat(), metadata=ANN)
        assert (await call.read()).text == "a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [row.outcome for row in await served.rows(1)] == [usage.Outcome.REPLICA_LOST]


async def test_stop_strings_and_a_loss_while_one_is_held_back_g4() -> None:
    """Case G4 over gRPC: ids come without text while it is held back; a loss then is an error."""

    async def script(received: harness.Received, out: harness.Out) -> None:
        assert received.body["stop"] == ["LMNOP"]
        await out.send(harness.data(harness.chat_event({"content": "JK"}), 1), harness.data(b"", 2))
        if received.body["max_tokens"] == 1:
            await out.reset()
            return
        await out.send(harness.data(harness.chat_event({}, "stop"), 3), harness.DONE)
        await out.finish(output=3)

    async with harness.one_replica(script) as (served, _), stub(served) as api:
        chunks = [chunk async for chunk in api.Generate(chat(stop=["LMNOP"]), metadata=ANN)]
        assert "".join(chunk.text for chunk in chunks) == "JK"
        assert [c.finish_reason for c in chunks if c.HasField("finish_reason")] == ["stop"]
        call = api.Generate(chat(stop=["LMNOP"], max_tokens=1), metadata=ANN)
        said: list[tuple[str, bool]] = []

        async def read() -> None:
            async for chunk in call:
                said.append((chunk.text, chunk.HasField("finish_reason")))

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "".join(text for text, _ in said) == "JK"
        assert not any(finished for _, finished in said)


async def test_preempted_batch_is_aborted() -> None:
    async def gives_way(received: harness.Received, out: harness.Out) -> None:
        await out.error(frames.Error("preempted", "gave its seat away", 503))

    async with harness.one_replica(gives_way) as (served, _), stub(served) as api:
        call = api.Generate(chat(priority="batch"), metadata=ANN)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_queue_full_and_deadline() -> None:
    starting = {"state": fleet.ReplicaState.STARTING}
    async with (
        harness.one_replica(harness.hello, replica=starting, queue_interactive=1) as (served, _),
        stub(served) as api,
    ):
        first = api.Generate(chat(deadline_ms=500), metadata=ANN)
        await harness.until(served.waiting)
        second = api.Generate(chat(), metadata=ANN)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(caught.value.trailing_metadata() or ())["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancel_ends_ones_own_request_only() -> None:
    async with harness.one_replica(harness.hang) as (served, fake), stub(served) as api:
        call = api.Generate(chat(), metadata=ANN)
        assert (await call.read()).text == "a"
        request_id = dict(await call.initial_metadata())["x-forebay-request-id"]
        asked = forebay_pb2.CancelRequest(request_id=request_id)
        assert not (await api.Cancel(asked, metadata=BOB)).cancelled
        assert fake.running == 1
        assert (await api.Cancel(asked, metadata=ANN)).cancelled
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        await fake.ended.wait()
        (row,) = await served.rows(1)
        assert (row.outcome, row.output_tokens) == (usage.Outcome.CANCELLED, 1)
        assert not (await api.Cancel(asked, metadata=ANN)).cancelled
        await served.idle()


async def test_an_id_to_cancel_that_is_longer_than_any_is_the_callers_fault() -> None:
    """It would be told to the owners of queues, and break the links to them."""
    async with harness.one_replica(harness.hello) as (served, _), stub(served) as api:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.Cancel(forebay_pb2.CancelRequest(request_id="x" * 257), metadata=ANN)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in str(caught.value.details())
        assert not (await api.Cancel(forebay_pb2.CancelRequest(), metadata=ANN)).cancelled


async def test_cancel_of_a_request_that_waits() -> None:
    starting = {"state": fleet.ReplicaState.STARTING}
    async with (
        harness.one_replica(harness.hello, replica=starting) as (served, _),
        stub(served) as api,
    ):
        call = api.Generate(chat(), metadata=ANN)
        request_id = dict(await call.initial_metadata())["x-forebay-request-id"]
        await harness.until(served.waiting)
        asked = forebay_pb2.CancelRequest(request_id=request_id)
        assert (await api.Cancel(asked, metadata=ANN)).cancelled
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert [row.outcome for row in await served.rows(1)] == [usage.Outcome.CANCELLED]


async def test_client_that_cancels_frees_the_replica() -> None:
    async with harness.one_replica(harness.hang) as (served, fake), stub(served) as api:
        call = api.Generate(chat(), metadata=ANN)
        await call.read()
        call.cancel()
        await asyncio.wait_for(fake.ended.wait(), 20)
        assert [row.outcome for row in await served.rows(1)] == [usage.Outcome.CLIENT_GONE]
        await served.idle()


async def test_list_models_shows_what_the_caller_may_use() -> None:
    async with harness.one_replica(harness.hello) as (served, _), stub(served) as api:
        answer = await api.ListModels(forebay_pb2.ListModelsRequest(), metadata=BOB)
        (model,) = answer.models
        assert (model.name, list(model.versions), list(model.adapters)) == ("chat", ["1"], ["poet"])
        assert (model.context_length, list(model.tiers)) == (2048, ["standard"])
        assert model.status == "ready"
        async with httpx.AsyncClient(
            trust_env=False, verify=False, headers=harness.ANN_AUTH
        ) as session:
            listed = (await session.get(f"{served.http}/v1/models")).json()["data"]
        assert listed[0]["forebay"]["status"] == "ready"


async def test_reflection_and_health() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(served.grpc, options=options) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            for name in ("", grpc_server.SERVICE):
                answer = await probe.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter(
                    [
                        reflection_pb2.ServerReflectionRequest(list_services=""),
                        reflection_pb2.ServerReflectionRequest(
                            file_containing_symbol=grpc_server.SERVICE
                        ),
                    ]
                )
            )
            listed = await ask.read()
            names = {service.name for service in listed.list_services_response.service}
            assert {grpc_server.SERVICE, "grpc.health.v1.Health"} <= names
            found = await ask.read()
            raw = found.file_descriptor_response.file_descriptor_proto[0]
            described = descriptor_pb2.FileDescriptorProto.FromString(raw)
            assert described.package == "forebay.v1"
            ask.cancel()


def test_openai_body_names_the_first_fault() -> None:
    endpoint, body = grpc_server.openai_body(chat())
    assert endpoint is requests.Endpoint.CHAT
    assert body["stream_options"] == {"include_usage": True}
    with pytest.raises(errors.BadRequest, match="either prompt or messages"):
        grpc_server.openai_body(forebay_pb2.GenerateRequest(model="chat", max_tokens=1))


async def test_calls_and_metadata_are_bounded() -> None:
    small = harness.gateway(fleets.make_view([]), grpc_calls=1)
    async with small as served, stub(served) as api:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await api.ListModels(
                forebay_pb2.ListModelsRequest(), metadata=(*ANN, ("x-large", "a" * 70_000))
            )
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await api.ListModels(forebay_pb2.ListModelsRequest(), metadata=ANN)).models
    async with (
        harness.one_replica(harness.hang, grpc_calls=1) as (served, fake),
        stub(served) as api,
    ):
        call = api.Generate(chat(), metadata=ANN)
        await harness.until(lambda: fake.running > 0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await api.ListModels(forebay_pb2.ListModelsRequest(), metadata=ANN)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await served.rows(1)
