"""The OpenAI interface, driven by the official client."""

import asyncio
import base64
import json
import struct

import openai

from scheduler.contracts import usage
from tests.unit.gateway import harness


def client(served: harness.Served, key: str = "ann") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.http}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=10),
    )


async def test_chat_whole_and_streamed() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), client(served) as api:
        whole = await api.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert whole.choices[0].message.content == "Hello world"
        stream = await api.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello world"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        rows = served.closed()
        assert [row.outcome for row in rows] == [usage.Outcome.OK, usage.Outcome.OK]
        row = rows[1]
        assert (row.uncached_prompt_tokens, row.output_tokens) == (5, 3)
        assert row.payer is usage.Payer.TEAM
        assert row.identity.team == "physics"
        assert row.identity.replica_id == "r1"
        assert row.identity.slurm_job_id == "4711"
        assert row.first_token_us >= row.identity.started_us >= row.identity.arrived_us > 0
        # The replica got the very same identity, and our request id with the attempt.
        assert fake.received[1].identity == row.identity
        assert fake.received[1].headers["x-request-id"] == f"{row.identity.request_id}.1"
        await served.idle()


async def test_sync_client_and_completions() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):

        def ask() -> str:
            with openai.OpenAI(
                base_url=f"{served.http}/v1",
                api_key="ann",
                http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
            ) as api:
                assert [model.id for model in api.models.list()] == ["chat", "chat:poet"]
                assert api.models.retrieve("chat:poet").id == "chat:poet"
                return api.completions.create(model="chat:poet", prompt=[1, 2, 3]).choices[0].text

        assert await asyncio.to_thread(ask) == "Hello world"
        assert fake.received[0].body["model"] == "poet"
        assert served.closed()[0].identity.adapter == "poet"


async def test_forebay_fields_are_heard_and_not_passed_on() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), client(served) as api:
        raw = await api.chat.completions.with_raw_response.create(
            model="chat",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"forebay_priority": "standard", "forebay_cache_hint": "k", "top_k": 5},
            extra_headers={"X-Forebay-Priority": "batch", "X-Request-Id": "mine"},
        )
        row = served.closed()[0]
        assert raw.headers["x-forebay-request-id"] == row.identity.request_id != "mine"
        assert row.identity.caller_request_id == "mine"
        assert row.identity.tier == "standard"  # the field goes before the header
        assert fake.received[0].body["top_k"] == 5
        assert not [key for key in fake.received[0].body if key.startswith("forebay")]


async def test_embeddings_base64_float_and_token_ids_g10() -> None:
    """Case G10: SDKs ask for base64 by default."""

    async def embed(received: harness.Received, out: harness.Out) -> None:
        inputs = received.body["input"]
        many = [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs
        vectors = [[0.5, -1.0, float(len(item))] for item in many]
        coded = [
            base64.b64encode(struct.pack("<3f", *v)).decode()
            if received.body.get("encoding_format") == "base64"
            else v
            for v in vectors
        ]
        items = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(coded)]
        used = {"prompt_tokens": 6, "total_tokens": 6}
        answer = {"object": "list", "data": items, "model": "chat", "usage": used}
        await out.send(harness.data(json.dumps(answer).encode()))
        await out.finish(prompt=6, output=0)

    async with harness.one_replica(embed) as (served, fake), client(served) as api:
        text = await api.embeddings.create(model="chat", input=["abc", "xyz"])
        tokens = await api.embeddings.create(model="chat", input=[[1, 2, 3], [4, 5, 6]])
        floats = await api.embeddings.create(
            model="chat", input=["abc", "xyz"], encoding_format="float"
        )
        assert fake.received[0].body["encoding_format"] == "base64"
        vectors = [[item.embedding for item in answer.data] for answer in (text, tokens, floats)]
        assert vectors[0] == vectors[1] == vectors[2] == [[0.5, -1.0, 3.0], [0.5, -1.0, 3.0]]
        assert text.usage.prompt_tokens == 6
        assert [row.uncached_prompt_tokens for row in served.closed()] == [6, 6, 6]
        assert [row.output_tokens for row in served.closed()] == [0, 0, 0]


async def test_choices_logprobs_and_usage_pass_through_g5() -> None:
    """Case G5: n=2 with logprobs, streamed: the bytes arrive as the engine wrote them."""
    lp = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]}
    events = []
    for index in (0, 1):
        for delta, reason in (({"content": "a"}, None), ({}, "stop")):
            choice = {
                "index": index,
                "delta": delta,
                "finish_reason": reason,
                "logprobs": lp if delta else None,
            }
            events.append(harness.chat_event(None, choices=[choice]))
    events.append(harness.chat_event(None, usage=harness.USED))

    async def script(received: harness.Received, out: harness.Out) -> None:
        for index, event in enumerate(events):
            await out.send(harness.data(event, index))
        await out.send(harness.DONE)
        await out.finish(output=2)

    async with harness.one_replica(script) as (served, _), client(served) as api:
        stream = await api.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        ends = [(c.index, c.finish_reason) for k in chunks for c in k.choices if c.finish_reason]
        assert ends == [(0, "stop"), (1, "stop")]
        logprobs = [c.logprobs for k in chunks for c in k.choices if c.logprobs]
        assert len(logprobs) == 2 == served.closed()[0].output_tokens
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None


async def test_bytes_cut_anywhere_arrive_whole_g6() -> None:
    """Case G6: characters cut by chunk boundaries on both hops."""
    text = "naïve 漢字 🦀"
    frame_bytes = (
        b"".join(harness.data(harness.chat_event({"content": c}), 1).encode() for c in text)
        + harness.DONE.encode()
    )

    async def script(received: harness.Received, out: harness.Out) -> None:
        for at in range(len(frame_bytes)):
            await out.raw(frame_bytes[at : at + 1])
        await out.finish()

    async with harness.one_replica(script) as (served, _), client(served) as api:
        stream = await api.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        got = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(got) == text


async def test_stop_holdback_is_forwarded_as_written_g4() -> None:
    """Case G4, the gateway's part: text that the engine holds back is never made up or lost."""

    async def script(received: harness.Received, out: harness.Out) -> None:
        assert received.body["stop"] == ["LMNOP"]
        await out.send(harness.data(harness.chat_event({"content": "JK"}), 1))
        await out.send(harness.data(b"", 2), harness.data(b"", 3))  # held back: ids, no text
        await out.send(harness.data(harness.chat_event({}, "stop"), 4), harness.DONE)
        await out.finish(output=4)

    async with harness.one_replica(script) as (served, _), client(served) as api:
        stream = await api.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "hi"}],
            stop=["LMNOP"],
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "JK"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert served.closed()[0].output_tokens == 4
