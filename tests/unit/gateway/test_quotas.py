"""Quotas on the request path: what is told over HTTP and gRPC, what is recorded; nothing stays held."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest

from scheduler.contracts import usage
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits
from tests.unit.gateway import harness

CHAT = "/v1/chat/completions"
DAY = limits.Key(limits.Scope.TEAM, "physics", "", "", "", limits.Kind.TOKENS_PER_DAY)
PLACES = DAY._replace(kind=limits.Kind.CONCURRENT)


def book(**amounts: int) -> books.Book:
    made = books.Book()
    made.set_limits(
        limits.Limit(DAY._replace(kind=limits.Kind(kind)), amount)
        for kind, amount in amounts.items()
    )
    return made


def session(served: harness.Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=served.http,
        headers=harness.ANN_AUTH,
        trust_env=False,
        verify=False,
        timeout=20,
        limits=httpx.Limits(max_connections=None),
    )


def used(quotas: books.Book, key: limits.Key = DAY) -> int:
    """Return what is used of all windows: a test may run over midnight."""
    quotas.used(0)
    return sum(amount for (name, _), amount in quotas.collect().items() if name == key)


async def test_a_used_up_quota_is_429_with_a_time_and_a_refused_row() -> None:
    quotas = book(tokens_per_day=1000)
    async with harness.one_replica(harness.hello, quotas=quotas) as (served, _):
        async with session(served) as http:
            answers = [
                await http.post(CHAT, json=harness.chat_body(max_tokens=tokens))
                for tokens in (800, 900, 2000)
            ]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        assert answers[2].json()["error"]["code"] == "request_larger_than_quota"
        assert used(quotas) == 16  # two answers of eight tokens each, not what they might have had
        quotas.set_limits([limits.Limit(DAY, 80)])
        async with session(served) as http:
            late = await http.post(CHAT, json=harness.chat_body(max_tokens=1))
        rows = await served.rows(4)
    error = late.json()["error"]
    assert (late.status_code, error["code"]) == (429, "quota_exceeded")
    assert error["type"] == "insufficient_quota"
    assert 0 < int(late.headers["retry-after"]) <= 86_400
    assert [row.outcome for row in rows][2:] == [usage.Outcome.REFUSED] * 2
    assert "tokens_per_day" in rows[3].reason
    assert rows[3].uncached_prompt_tokens + rows[3].output_tokens == 0
    assert quotas.open == 0


async def test_grpc_says_resource_exhausted_with_a_time() -> None:
    quotas = book(concurrent=1)
    async with (
        harness.one_replica(harness.hang, quotas=quotas) as (served, _),
        grpc.aio.insecure_channel(served.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        api: Any = forebay_pb2_grpc.InferenceStub(channel)
        message = forebay_pb2.Message(role="user", content="hi")
        ask = forebay_pb2.GenerateRequest(model="chat", max_tokens=8, messages=[message])
        who = (("authorization", "Bearer ann"),)
        first = api.Generate(ask, metadata=who)
        assert (await first.read()).text == "a"
        second = api.Generate(ask, metadata=who)
        assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(await second.trailing_metadata())
        assert (trailers["x-forebay-code"], trailers["retry-after"]) == ("quota_exceeded", "1")
        first.cancel()
        await served.idle()
        third = api.Generate(ask, metadata=who)
        assert (await third.read()).text == "a"
        third.cancel()
        await served.idle()
    assert (quotas.open, used(quotas, PLACES)) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave_queued_or_running_leave_nothing_held(stream: bool) -> None:
    quotas = book(tokens_per_day=10**9, concurrent=100)
    async with (
        harness.one_replica(harness.hang, quotas=quotas, replica={"seats": 2}) as (served, fake),
        session(served) as http,
    ):
        body = harness.chat_body(max_tokens=50, stream=stream)
        asking = [asyncio.create_task(http.post(CHAT, json=body)) for _ in range(12)]
        await harness.until(lambda: quotas.open == 12 and fake.running > 0)
        for task in asking:
            task.cancel()
        await harness.until(lambda: quotas.open == 0)
        await served.idle()
        rows = await served.rows(12)
    recorded = sum(row.uncached_prompt_tokens + row.output_tokens for row in rows)
    assert used(quotas) == recorded


async def test_two_hundred_at_once_never_run_beside_each_other_beyond_their_places() -> None:
    quotas, most = book(concurrent=5), 0

    async def watched(received: harness.Received, out: harness.Out) -> None:
        nonlocal most
        most = max(most, fake.running)
        await harness.hello(received, out)

    async with (
        harness.one_replica(watched, quotas=quotas) as (served, fake),
        session(served) as http,
    ):
        body = harness.chat_body(max_tokens=4)
        answers = await asyncio.gather(*[http.post(CHAT, json=body) for _ in range(200)])
        codes = {answer.status_code for answer in answers}
        assert codes <= {200, 429}
        assert 200 in codes
        assert most <= 5
        await served.idle()
    assert quotas.open == 0
