"""What answers tell in their heads: the request's id, and what is left of its team's quotas."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from gateway.admission import messages
from scheduler.contracts import quota
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.unit.gateway import admission_site, asking, fleets, harness
from tests.unit.gateway.test_openai import client
from tests.unit.gateway.test_quotas import book

ASK: Any = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
LIMITS = ("x-ratelimit-limit-requests", "x-ratelimit-limit-tokens")
LEFT = ("x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens")
RESET = ("x-ratelimit-reset-requests", "x-ratelimit-reset-tokens")


def two_limits() -> Any:
    return book(tokens_per_minute=1000, requests_per_minute=2)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_sees_its_limits_on_answers_and_refusals(stream: bool) -> None:
    async with (
        harness.one_replica(harness.hello, quotas=two_limits()) as (served, _),
        client(served) as api,
    ):
        create = api.chat.completions.with_raw_response.create
        first = (await create(**ASK, stream=stream)).headers
        second = (await create(**ASK, stream=stream)).headers
        with pytest.raises(openai.RateLimitError) as refused:
            await create(**ASK, stream=stream)
        await served.idle()
    assert [first[name] for name in LIMITS] == ["2", "1000"]
    assert (first[LEFT[0]], second[LEFT[0]]) == ("1", "0")
    assert 0 < int(second[LEFT[1]]) < int(first[LEFT[1]]) < 1000
    assert {first[name][-1] for name in RESET} == {"s"}
    told = refused.value.response.headers
    assert (told[LIMITS[0]], told[LEFT[0]]) == ("2", "0")
    assert 0 < int(told[RESET[0]].rstrip("s")) <= 61
    assert int(told["retry-after"]) <= 61


async def test_nothing_is_told_without_quotas_over_a_minute() -> None:
    async with (
        harness.one_replica(harness.hello, quotas=book(tokens_per_day=10**6)) as (served, _),
        client(served) as api,
    ):
        raw = await api.chat.completions.with_raw_response.create(**ASK)
    assert not [name for name in raw.headers if name.startswith("x-ratelimit")]


async def test_every_answer_has_the_id_that_openais_clients_read() -> None:
    async with harness.one_replica(harness.hello) as (served, _), client(served) as api:
        whole = await api.chat.completions.create(**ASK)
        raw = await api.chat.completions.with_raw_response.create(**ASK, stream=True)
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(**ASK, top_p=7.0)
        models = await api.models.with_raw_response.list()
        async with client(served, "nobody") as stranger:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await stranger.models.list()
        rows = served.closed()
    assert whole._request_id == rows[0].identity.request_id
    assert raw.request_id == rows[1].identity.request_id
    for headers in (bad.value.response.headers, models.headers, unknown.value.response.headers):
        assert headers["x-request-id"] == headers["x-forebay-request-id"]
    assert bad.value.request_id


async def test_grpc_tells_the_id_first_and_the_limits_last() -> None:
    async with (
        harness.one_replica(harness.hello, quotas=two_limits()) as (served, _),
        grpc.aio.insecure_channel(served.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        stub: Any = forebay_pb2_grpc.InferenceStub(channel)
        message = forebay_pb2.Message(role="user", content="hi")
        ask = forebay_pb2.GenerateRequest(model="chat", messages=[message], max_tokens=8)
        calls = [stub.Generate(ask, metadata=(("authorization", "Bearer ann"),)) for _ in range(3)]
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
        codes = [await call.code() for call in calls]
        heads = [dict(await call.initial_metadata()) for call in calls]
        trailers = [dict(await call.trailing_metadata()) for call in calls]
    assert sorted(code.name for code in codes) == ["OK", "OK", "RESOURCE_EXHAUSTED"]
    assert all(head["x-request-id"] == head["x-forebay-request-id"] for head in heads)
    assert sorted(one[LEFT[0]] for one in trailers) == ["0", "0", "1"]


async def test_who_is_turned_away_at_the_door_finds_the_same_id_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.access_log")
    async with (
        harness.one_replica(harness.hello) as (served, _),
        client(served) as api,
        grpc.aio.insecure_channel(served.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(**ASK, top_p=7.0)
        stub: Any = forebay_pb2_grpc.InferenceStub(channel)
        ask = forebay_pb2.GenerateRequest(model="chat", prompt="hi", max_tokens=8)
        call = stub.Generate(ask, metadata=(("authorization", "Bearer nobody"),))
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await call.read()
        async with asking.http(served) as http:
            numbers = (await http.get("/metrics")).text
    trailers = unknown.value.trailing_metadata()
    assert trailers is not None
    over_grpc = dict(trailers)["x-request-id"]
    logged = {vars(record).get("forebay.request_id") for record in caplog.records}
    assert {bad.value.request_id, over_grpc} <= logged
    for reason in ("bad_request", "invalid_api_key"):
        assert f'forebay_refusals_total{{model="",reason="{reason}",tier=""}} 1.0' in numbers


class _Told(admission_site.Book):
    """Quotas that tell."""

    def reserve(self, claim: quota.Claim) -> quota.Hold:
        hold = super().reserve(claim)
        hold.headers = lambda now_us: (("x-ratelimit-limit-tokens", "9"),)  # type: ignore[method-assign]
        return hold


async def test_another_process_hears_them_with_the_turn(tmp_path: Path) -> None:
    view = fleets.make_view([fleets.make_replica("r1")])
    house = admission_site.House(tmp_path, view)
    await house.start()
    object.__setattr__(house.room._deps, "quotas", _Told())
    try:
        async with house.worker() as room:
            await harness.until(lambda: room.connected)
            waiter = room.enter(admission_site.ask("q1"))
            grant = await room.wait(waiter)
            assert grant.limits == (("x-ratelimit-limit-tokens", "9"),)
            room.leave(waiter)
    finally:
        await house.end()


def test_both_ways_of_the_link_carry_them() -> None:
    limits = (("x-ratelimit-limit-tokens", "9"),)
    for word in (
        messages.Granted("q", 1, "v", limits),
        messages.Refused("q", "quota_exceeded", "used up", 7.0, None, limits),
    ):
        frame = messages.encode(word)
        assert messages.from_owner.decode(frame[messages.LENGTH.size :]) == word
