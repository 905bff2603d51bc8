"""`/v1/responses` through the gateway: read by OpenAI's client, recorded, refused, broken off."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from gateway import asks, checks, fingerprints
from scheduler.contracts import errors, frames, ids, requests, usage
from tests.unit.gateway import harness
from tests.unit.gateway.asking import http

PATH = requests.Endpoint.RESPONSES.value
RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "chat", "status": "completed",
    "output": [
        {
            "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Hi you", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "usage": {
        "input_tokens": 5, "output_tokens": 2, "total_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}  # fmt: skip
PROMPT = frames.Frame.of(frames.Kind.PROMPT, b"it is no chat and no completion", (1, 2, 3, 4, 5))


def event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def delta(text: str) -> bytes:
    return event("response.output_text.delta", delta=text, item_id="msg_1", output_index=0)


CREATED = event("response.created", response={**RESPONSE, "status": "in_progress", "output": []})
COMPLETED = event("response.completed", response=RESPONSE)


async def hi(received: harness.Received, out: harness.Out) -> None:
    if received.body.get("stream"):
        await out.send(PROMPT, harness.data(CREATED + delta("Hi"), 7))
        await out.send(harness.data(delta(" you"), 8), harness.data(COMPLETED))
    else:
        await out.send(PROMPT, harness.data(json.dumps(RESPONSE).encode(), 7, 8))
    await out.finish(output=2)


def client(served: harness.Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.http}/v1",
        api_key="ann",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=10),
    )


async def test_openais_client_reads_it_whole_and_streamed() -> None:
    async with harness.one_replica(hi) as (served, fake), client(served) as api:
        whole = await api.responses.create(model="chat", input="Hello", max_output_tokens=9)
        stream: Any = await api.responses.create(model="chat", input="Hello", stream=True)
        parts = [part async for part in stream]

        assert whole.output_text == "Hi you"
        assert [part.type for part in parts][-1] == "response.completed"
        assert "".join(p.delta for p in parts if p.type == "response.output_text.delta") == "Hi you"
        assert [received.path for received in fake.received] == [PATH, PATH]
        rows = served.closed()
        assert [(row.outcome, row.output_tokens) for row in rows] == [(usage.Outcome.OK, 2)] * 2
        assert rows[0].identity.endpoint == PATH
        await served.idle()


async def test_the_last_event_waits_for_the_record() -> None:
    hold = asyncio.Event()

    async def slowly(received: harness.Received, out: harness.Out) -> None:
        await out.send(PROMPT, harness.data(CREATED + delta("Hi"), 7))
        await out.send(harness.data(COMPLETED))
        await hold.wait()
        await out.finish(output=1)

    async with harness.one_replica(slowly) as (served, _), client(served) as api:
        stream: Any = await api.responses.create(model="chat", input="Hello", stream=True)
        kinds = []
        async for part in stream:
            kinds.append(part.type)
            if part.type == "response.output_text.delta":
                assert not served.closed_yet()
                hold.set()
            elif part.type == "response.completed":
                assert served.closed_yet()
        assert kinds == ["response.created", "response.output_text.delta", "response.completed"]


async def test_a_lost_replica_is_told_as_an_event_on_which_the_client_raises() -> None:
    async def cut(received: harness.Received, out: harness.Out) -> None:
        await out.send(PROMPT, harness.data(CREATED + delta("Hi"), 7))
        await out.reset()

    async with harness.one_replica(cut) as (served, _), client(served) as api:
        stream: Any = await api.responses.create(model="chat", input="Hello", stream=True)
        with pytest.raises(openai.APIError, match="no chat and no completion"):
            async for _ in stream:
                pass
        async with httpx.AsyncClient(
            trust_env=False, verify=False, headers=harness.ANN_AUTH
        ) as http:
            body = {"model": "chat", "input": "Hello", "stream": True}
            text = (await http.post(served.http + PATH, json=body)).text
        name, _, payload = text.rstrip().rpartition("\n\n")[2].partition("\n")
        assert name == "event: error"
        told = json.loads(payload.removeprefix("data: "))
        assert (told["type"], told["code"]) == ("error", "replica_lost")
        assert told["error"]["code"] == "replica_lost"
        rows = await served.rows(2)
        assert {row.outcome for row in rows} == {usage.Outcome.REPLICA_LOST}


@pytest.mark.parametrize("said", [b"Not Found", b'{"detail":"Not Found"}', b""])
async def test_an_engine_without_it_is_a_404_that_names_model_and_endpoint(said: bytes) -> None:
    async def missing(received: harness.Received, out: harness.Out) -> None:
        await out.plain(404, said)

    async with harness.one_replica(missing) as (served, _), client(served) as api:
        with pytest.raises(openai.NotFoundError, match="model chat: its engine has no /v1/resp"):
            await api.responses.create(model="chat", input="Hello")
        (row,) = await served.rows(1)
        assert (row.outcome, row.output_tokens) == (usage.Outcome.REFUSED, 0)


async def test_nothing_is_stored() -> None:
    async with harness.one_replica(hi) as (served, fake), client(served) as api:
        for ask in (api.responses.retrieve, api.responses.delete, api.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="no response is stored"):
                await ask("resp_1")
        assert not fake.received


async def test_a_client_that_leaves_ends_it_at_the_replica() -> None:
    async with harness.one_replica(harness.hang) as (served, fake), client(served) as api:
        asked = asyncio.create_task(api.responses.create(model="chat", input="Hello"))
        await harness.until(lambda: fake.running > 0)
        asked.cancel()
        await asyncio.wait({asked})
        await fake.ended.wait()
        (row,) = await served.rows(1)
        assert row.outcome is usage.Outcome.CLIENT_GONE
        await served.idle()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": None}, "input: must be text or a list of items"),
        ({"input": []}, "input: must be text or a list of items"),
        ({"input": ["a"]}, r"input\[0\]: must be an object, not a string"),
        ({"input": [{"content": "a"}]}, r"input\[0\].role: must be a string"),
        ({"input": [{"role": "user", "content": 3}]}, r"input\[0\].content: must be a string"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: no item is stored here"),
        ({"instructions": ["a"]}, "instructions: must be a string"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1"),
        ({"background": True}, "background: is not offered"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: is not offered"),
        ({"conversation": {"id": "c"}}, "conversation: is not offered"),
        ({"prompt": {"id": "p"}}, "prompt: is not offered"),
        ({"messages": []}, "'messages' is no field of /v1/responses"),
        ({"request_id": "resp_9"}, "'request_id' can't be set through this service"),
    ],
)
def test_bad_input_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.BadRequest, match=words):
        checks.check(requests.Endpoint.RESPONSES, {"model": "m", "input": "a", **change})


ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a" * 300}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "b" * 300},
]


def test_what_openais_client_sends_is_accepted() -> None:
    for given in ("a", ITEMS):
        checks.check(
            requests.Endpoint.RESPONSES,
            {"model": "m", "input": given, "store": True, "background": False, "stream": True},
        )


def ask(
    body: dict[str, Any], endpoint: requests.Endpoint = requests.Endpoint.RESPONSES
) -> requests.InferenceRequest:
    return requests.InferenceRequest(
        ids.RequestId("r"), endpoint, body, "m", requests.Tier.STANDARD, harness.ANN,
        stream=False, arrived_us=1,
    )  # fmt: skip


def test_admission_sees_its_limit_and_its_length() -> None:
    text = asks.of(ask({"input": "a" * 70, "instructions": "b" * 30, "max_output_tokens": 9}))
    assert (text.chars, text.max_tokens, text.seats) == (100, 9, 1)
    assert asks.of(ask({"input": ITEMS})).chars > 600


def test_it_shares_its_prefix_with_a_chat_of_the_same_words() -> None:
    system, user = "s" * 700, "u" * 700
    chat = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}
    one = fingerprints.of(ask(chat, requests.Endpoint.CHAT))
    assert fingerprints.of(ask({"instructions": system, "input": user})) == one
    items = [{"role": "user", "content": [{"type": "input_text", "text": user}]}]
    assert fingerprints.of(ask({"instructions": system, "input": items})) == one
    assert fingerprints.of(ask({"instructions": "t" * 700, "input": user})) != one


async def test_what_is_null_is_not_said() -> None:
    """vLLM puts what was asked into the answer's opening, and can't say null of some of it."""
    async with harness.one_replica(hi) as (served, fake), http(served) as session:
        body = {"model": "chat", "input": "Hello", "background": None, "truncation": None}
        assert (await session.post(PATH, json=body)).status_code == 200
        assert fake.received[0].body == {"model": "chat", "input": "Hello"}
        chat = harness.chat_body(stop=None)  # elsewhere a body passes as it is
        await session.post("/v1/chat/completions", json=chat)
        assert fake.received[1].body == chat
