"""Replicas that are lost: told, never made up, and the request goes elsewhere where it can."""

import asyncio
import json

import openai
import pytest

from gateway import resolve
from scheduler.contracts import errors, frames, usage
from tests.unit.gateway import harness
from tests.unit.gateway.asking import code, http, two

CHAT = "/v1/chat/completions"


async def cut_after_two(received: harness.Received, out: harness.Out) -> None:
    await out.send(harness.FINAL, harness.data(harness.chat_event({"role": "assistant"})))
    await out.send(harness.data(harness.chat_event({"content": "Hel"}), 7))
    await out.send(harness.data(harness.chat_event({"content": "lo"}), 8))
    await out.reset()


async def test_reset_mid_stream_is_told_never_made_up_g1() -> None:
    """Case G1: no finish_reason, no [DONE]; the client raises; one row, at the platform's cost."""
    async with harness.one_replica(cut_after_two) as (served, _):
        async with http(served) as session:
            body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert "[DONE]" not in body
        events = [json.loads(line[6:]) for line in body.splitlines() if line]
        assert events[-1]["error"]["code"] == "replica_lost"
        assert not [c for event in events for c in event.get("choices", ()) if c["finish_reason"]]
        (row,) = await served.rows(1)
        assert (row.outcome, row.payer) == (usage.Outcome.REPLICA_LOST, usage.Payer.PLATFORM)
        assert (row.uncached_prompt_tokens, row.output_tokens) == (5, 2)
        await served.idle()


async def test_openai_client_raises_on_a_cut_stream_g1() -> None:
    async with (
        harness.one_replica(cut_after_two) as (served, _),
        openai.AsyncOpenAI(
            base_url=f"{served.http}/v1",
            api_key="ann",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
        ) as api,
    ):
        stream = await api.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = []

        async def read() -> None:
            async for chunk in stream:
                text.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="replica was lost"):
            await read()
        assert "".join(text) == "Hello"


async def test_killed_in_the_middle_of_a_character_g6() -> None:
    """Case G6: whole characters before it arrive as they are; of the cut one nothing, and no U+FFFD."""
    crab = harness.data(harness.chat_event({"content": "🦀"}), 2).encode()

    async def cut(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "naïve 漢字 "}), 1))
        await out.raw(crab[: crab.index("🦀".encode()) + 2])
        await out.reset()

    async with harness.one_replica(cut) as (served, _), http(served) as session:
        raw = (await session.post(CHAT, json=harness.chat_body(stream=True))).content
        first, last = [json.loads(line[6:]) for line in raw.decode().splitlines() if line]
        assert first["choices"][0]["delta"]["content"] == "naïve 漢字 "
        assert last["error"]["code"] == "replica_lost"
        assert "\ufffd" not in raw.decode()


async def lost_after_lm(received: harness.Received, out: harness.Out) -> None:
    """Die while the engine holds ``LM`` back, which may be half of the stop string ``LMNOP``."""
    await out.send(harness.data(harness.chat_event({"content": "JK"}), 1), harness.data(b"", 2))
    await out.reset()


async def test_lost_while_half_a_stop_string_is_held_back_g4() -> None:
    """Case G4: what is held back is not blurted out with the error, and nothing ends in silence."""
    async with harness.one_replica(lost_after_lm) as (served, _), http(served) as session:
        body = (await session.post(CHAT, json=harness.chat_body(stream=True, stop="LMNOP"))).text
        first, last = [json.loads(line[6:]) for line in body.splitlines() if line]
        assert first["choices"][0]["delta"]["content"] == "JK"
        assert last["error"]["code"] == "replica_lost"
        assert "LM" not in body.replace("LMNOP", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_loss_before_the_first_byte_goes_elsewhere(stream: bool) -> None:
    async def dies(received: harness.Received, out: harness.Out) -> None:
        if not stream:  # an answer that is not streamed may be lost at any point
            await out.send(harness.PROMPT, harness.data(b'{"half', 1))
        await out.reset()

    async with two(dies, harness.hello) as (served, one, other):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body(stream=stream))
        assert response.status_code == 200
        assert "half" not in response.text
        rows = sorted(served.closed(), key=lambda row: row.identity.attempt)
        assert [row.identity.attempt for row in rows] == [1, 2]
        assert [row.outcome for row in rows] == [usage.Outcome.REPLICA_LOST, usage.Outcome.OK]
        assert rows[0].identity.request_id == rows[1].identity.request_id
        assert rows[0].payer is usage.Payer.PLATFORM
        assert (len(one.received), len(other.received)) == (1, 1)


async def test_every_replica_lost_ends_in_502() -> None:
    async def dies(received: harness.Received, out: harness.Out) -> None:
        await out.reset()

    async with harness.one_replica(dies, replica_attempts=1) as (served, _):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body(stream=True))
        assert (response.status_code, code(response)) == (502, "replica_lost")
        assert [row.outcome for row in served.closed()] == [usage.Outcome.REPLICA_LOST]


async def test_preempted_batch_is_503_and_the_platforms() -> None:
    async def gives_way(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.PROMPT, harness.data(b"", 1, 2))
        await out.error(frames.Error("preempted", "gave its seat away", 503, 5, 0, 2))

    async with harness.one_replica(gives_way) as (served, fake):
        async with http(served) as session:
            response = await session.post(
                CHAT,
                json=harness.chat_body(forebay_priority="interactive"),  # not for a batch line
                headers={
                    "Authorization": "Bearer svc",
                    "X-Forebay-Priority": "batch",
                    "X-Forebay-Batch-Job": "12",
                    "X-Forebay-Custom-Id": "line%201%25%0A%C3%AF%5C",
                    "X-Forebay-Team": "chem",
                    "X-Forebay-User": "bob",
                },
            )
        assert (response.status_code, code(response)) == (503, "preempted")
        (row,) = served.closed()
        assert (row.outcome, row.payer) == (usage.Outcome.PREEMPTED, usage.Payer.PLATFORM)
        assert (row.uncached_prompt_tokens, row.output_tokens) == (5, 2)
        identity = row.identity
        assert (identity.team, identity.user, identity.key_id) == ("chem", "bob", "key-svc")
        assert (identity.batch_job_id, identity.custom_id) == (12, "line 1%\nï\\")
        assert identity.tier == "batch"
        assert fake.received[0].identity == identity


LINE = {"X-Forebay-Priority": "batch", "X-Forebay-Batch-Job": "12", "X-Forebay-Custom-Id": "a"}


async def test_how_often_a_line_was_preempted_is_told_to_its_replica() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), http(served) as session:
        for said in ({}, {"X-Forebay-Preempted": "0"}, {"X-Forebay-Preempted": "2"}):
            headers = {"Authorization": "Bearer svc", **LINE, **said}
            answer = await session.post(CHAT, json=harness.chat_body(), headers=headers)
            assert answer.status_code == 200
    told = [received.headers.get("x-forebay-preempted") for received in fake.received]
    assert told == [None, None, "2"]


async def test_nobody_but_the_runner_pins_a_line() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), http(served) as session:
        headers = {**LINE, "X-Forebay-Preempted": "2"}
        answer = await session.post(CHAT, json=harness.chat_body(), headers=headers)
        assert answer.status_code == 200
        body = harness.chat_body(forebay_preempted=2)
        refused = await session.post(CHAT, json=body)
        assert refused.status_code == 400
    (received,) = fake.received
    assert "x-forebay-preempted" not in received.headers
    assert received.identity.tier == "batch"


@pytest.mark.parametrize("said", ["", "-1", "x", "2.0", "1" * 10, "\u0662"])
def test_a_count_of_preemptions_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(errors.BadRequest, match="X-Forebay-Preempted: must be how often"):
        resolve.batch_ref(
            harness.SERVICE, {"x-forebay-batch-job": "12", "x-forebay-preempted": said}
        )


async def test_lost_batch_is_left_to_the_runner() -> None:
    async with harness.one_replica(cut_after_two) as (served, fake):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body(forebay_priority="batch"))
        assert (response.status_code, code(response)) == (502, "replica_lost")
        assert len(fake.received) == 1


async def test_silent_stream_is_lost() -> None:
    async def silent(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "a"}), 1))
        await out.gone()

    async with harness.one_replica(silent, stream_idle_s=0.1) as (served, fake):
        async with http(served) as session:
            body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert "replica_lost" in body
        assert "[DONE]" not in body
        async with asyncio.timeout(20):
            await fake.ended.wait()
