"""A large body is judged while everything else goes on."""

import asyncio
import gc
import json
import threading
from typing import Any

import httpx
import pytest

from gateway import apart, asks, checks
from scheduler.contracts import errors, requests
from scheduler.contracts.v1 import forebay_pb2
from tests.unit.gateway import harness
from tests.unit.gateway.test_grpc import ANN, chat, stub

CHAT = "/v1/chat/completions"
TEXT = "x" * (apart.LARGE + 1)


@pytest.fixture(params=["judged", "measured"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no large body is found to be good, or it is not known what one asks for."""
    go = threading.Event()
    check, of = checks.check, asks.of

    def wait(body: Any) -> None:
        if len(body["messages"][0]["content"]) > apart.LARGE:
            assert go.wait(20)

    def slow(endpoint: requests.Endpoint, body: Any, more: Any = ()) -> None:
        wait(body)
        check(endpoint, body, more)

    def slowly(asked: requests.InferenceRequest, *how: Any, **more: Any) -> asks.Asking:
        wait(asked.body)
        return of(asked, *how, **more)

    if request.param == "judged":
        monkeypatch.setattr(checks, "check", slow)
    else:
        monkeypatch.setattr(asks, "of", slowly)
    return go


async def post(served: harness.Served, content: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as session:
        body = harness.chat_body(messages=[{"role": "user", "content": content}])
        return await session.post(served.http + CHAT, json=body, headers=harness.ANN_AUTH)


async def test_others_are_served_while_a_large_body_is_judged(held: threading.Event) -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        large = asyncio.create_task(post(served, TEXT))
        assert (await post(served, "hi")).status_code == 200
        assert len(fake.received) == 1
        held.set()
        assert (await large).status_code == 200
        assert fake.received[1].body["messages"][0]["content"] == TEXT


async def test_the_same_over_grpc(held: threading.Event) -> None:
    async with harness.one_replica(harness.hello) as (served, _), stub(served) as api:
        said = [forebay_pb2.Message(role="user", content=TEXT)]
        large = api.Generate(chat(messages=said), metadata=ANN)
        small = [chunk.text async for chunk in api.Generate(chat(), metadata=ANN)]
        assert "".join(small) == "Hello world"
        held.set()
        assert "".join([chunk.text async for chunk in large]) == "Hello world"


async def test_faults_in_a_large_body_are_told() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        for body in (TEXT.encode(), json.dumps({"model": "chat", "messages": TEXT}).encode()):
            async with httpx.AsyncClient(trust_env=False, verify=False) as session:
                answer = await session.post(
                    served.http + CHAT, content=body, headers=harness.ANN_AUTH
                )
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == errors.BadRequest.code
        assert not fake.received


def test_many_lists_are_parsed_without_a_collection_among_them() -> None:
    """Of 20 MB of small lists collections took six sevenths of the time."""
    raw = b'{"model":"chat","messages":[' + b"[]," * 200_000 + b"1]}"
    begun: list[int] = []
    gc.callbacks.append(note := lambda phase, _: begun.append(gc.get_count()[0]))
    try:
        found = checks._uncollected(checks._decode, raw)
        assert not begun
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(found["messages"]) == 200_001
    with pytest.raises(ZeroDivisionError):
        checks._uncollected(divmod, 1, 0)
    assert gc.isenabled()


@pytest.mark.parametrize("inner", [[], {}, [1], {"a": 1}])
def test_the_deepest_level_may_hold_values_and_the_next_nothing_at_all(inner: Any) -> None:
    value = inner
    for _ in range(checks.MAX_DEPTH - 1):
        value = [1, value]
    assert not checks._deep(value)
    assert checks._deep([value])
    assert checks._deep({"wide": [0] * 100 + [value]})


@pytest.mark.parametrize("each", ["a", [1]])
def test_more_prompts_than_any_replica_has_seats_are_refused_at_once(each: Any) -> None:
    def check(prompt: Any) -> None:
        checks.check(requests.Endpoint.COMPLETIONS, {"model": "chat", "prompt": prompt})

    check([each] * checks.MAX_PARTS)
    check([1] * (checks.MAX_PARTS + 1))
    with pytest.raises(errors.BadRequest, match="prompt: at most 65536 items"):
        check([each] * (checks.MAX_PARTS + 1))
