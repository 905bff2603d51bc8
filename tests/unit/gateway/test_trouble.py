"""Replicas that die or refuse, clients that leave, full disks: what is told and recorded."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scheduler.contracts import errors, fleet, frames, usage
from tests.unit.gateway import harness

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def http(served: harness.Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=served.http, headers=harness.ANN_AUTH, trust_env=False, verify=False, timeout=20
    ) as session:
        yield session


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


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
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
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
async def test_client_that_leaves_frees_the_replica_g2(stream: bool) -> None:
    """Case G2: with all middleware on, leaving reaches the replica; load 0; one row client gone."""
    async with harness.one_replica(harness.hang) as (served, fake):
        async with http(served) as session:
            asked = asyncio.create_task(
                session.post(CHAT, json=harness.chat_body(stream=stream, max_tokens=4000))
            )
            await harness.until(lambda: fake.running > 0)
            asked.cancel()
            await asyncio.wait({asked})
            async with asyncio.timeout(5):
                await fake.ended.wait()
        assert fake.running == 0
        (row,) = await served.rows(1)
        assert (row.outcome, row.payer) == (usage.Outcome.CLIENT_GONE, usage.Payer.TEAM)
        assert row.output_tokens == int(stream)
        await served.idle()


async def test_client_that_leaves_the_queue_costs_nothing() -> None:
    async with harness.one_replica(
        harness.hello, replica={"state": fleet.ReplicaState.STARTING}
    ) as (
        served,
        fake,
    ):
        async with http(served) as session:
            with pytest.raises(httpx.ReadTimeout):
                await session.post(CHAT, json=harness.chat_body(), timeout=0.2)
        (row,) = await served.rows(1)
        assert (row.outcome, row.output_tokens) == (usage.Outcome.CLIENT_GONE, 0)
        assert row.identity.replica_id == ""
        assert not fake.received
        await served.idle()


@contextlib.asynccontextmanager
async def two(
    first: harness.Script, second: harness.Script, **options: Any
) -> AsyncIterator[tuple[harness.Served, harness.FakeReplica, harness.FakeReplica]]:
    """Serve two replicas; the second starts to serve only when the first has been asked."""
    second_view: list[fleet.FleetView] = []
    holder: list[harness.Served] = []

    async def then_second(received: harness.Received, out: harness.Out) -> None:
        holder[0].fleet.set(second_view[0])
        await first(received, out)

    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(then_second, "r1").listening() as one,
            harness.FakeReplica(second, "r2").listening() as other,
        ):
            r1, r2 = one.replica(Path(name)), other.replica(Path(name))
            waiting = dataclasses.replace(r2, state=fleet.ReplicaState.WARM)
            second_view.append(harness.make_view([r1, r2], revision=2))
            async with harness.gateway(harness.make_view([r1, waiting]), **options) as served:
                holder.append(served)
                yield served, one, other


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


async def test_full_replica_is_asked_again_with_the_place_kept() -> None:
    turns = iter([True, True, False])

    async def full_twice(received: harness.Received, out: harness.Out) -> None:
        if next(turns, False):
            await out.json(429, {"error": {"code": "replica_full", "message": "full"}, "stats": {}})
        else:
            await harness.hello(received, out)

    async with harness.one_replica(full_twice) as (served, fake):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body())
            numbers = (await session.get("/metrics")).text
        assert response.status_code == 200
        (row,) = served.closed()  # an attempt that found no seat has not begun: it leaves no row
        assert (row.outcome, row.output_tokens, row.identity.attempt) == (usage.Outcome.OK, 3, 1)
        assert [r.headers["x-request-id"][-2:] for r in fake.received] == [".1", ".1", ".1"]
        assert 'forebay_seat_refusals_total{model="chat",tier="interactive"} 2.0' in numbers


async def test_a_line_that_finds_no_seat_for_long_asks_ever_more_rarely() -> None:
    """A batch queue beside a full replica: pauses double, and the ledger holds one row, the client's end."""
    now = asyncio.get_running_loop().time
    asked: list[float] = []

    async def full(received: harness.Received, out: harness.Out) -> None:
        asked.append(now())
        await out.json(429, {"error": {"code": "replica_full", "message": "full"}, "stats": {}})

    options = {"full_backoff_s": 0.02, "full_backoff_most_s": 0.3}
    async with harness.one_replica(full, **options) as (served, _):
        async with http(served) as session:
            body = harness.chat_body(forebay_priority="batch")
            waiting = asyncio.create_task(session.post(CHAT, json=body))
            await harness.until(lambda: len(asked) >= 7)
            waiting.cancel()
            (row,) = await served.rows(1)
        await served.idle()
    assert (row.outcome, row.identity.attempt) == (usage.Outcome.CLIENT_GONE, 1)
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    # The n-th is 20 ms * 2^n at most, half of that at least; the room looks every 50 ms besides.
    assert all(pause >= 0.01 * 2**n for n, pause in enumerate(pauses[:4]))
    assert all(pause >= 0.15 for pause in pauses[4:])


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


async def test_batch_headers_of_others_are_not_heard() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        async with http(served) as session:
            forged = {"X-Forebay-Team": "chem", "X-Forebay-Batch-Job": "12"}
            assert (await session.post(CHAT, json=harness.chat_body(), headers=forged)).is_success
        identity = served.closed()[0].identity
        assert (identity.team, identity.batch_job_id) == ("physics", 0)


async def test_lost_batch_is_left_to_the_runner() -> None:
    async with harness.one_replica(cut_after_two) as (served, fake):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body(forebay_priority="batch"))
        assert (response.status_code, code(response)) == (502, "replica_lost")
        assert len(fake.received) == 1


async def test_engine_refusal_passes_through() -> None:
    async def too_long(received: harness.Received, out: harness.Out) -> None:
        text = "This model's maximum context length is 2048 tokens. " + "x" * 9000
        error = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
        await out.json(400, {"error": error})

    async with harness.one_replica(too_long) as (served, _):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body())
        assert (response.status_code, code(response)) == (400, "context_length_exceeded")
        assert len(response.content) < 8192
        assert [row.outcome for row in served.closed()] == [usage.Outcome.REFUSED]


async def test_silent_stream_is_lost() -> None:
    async def silent(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "a"}), 1))
        await out.gone()

    async with harness.one_replica(silent, stream_idle_s=0.1) as (served, fake):
        async with http(served) as session:
            body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert "replica_lost" in body
        assert "[DONE]" not in body
        async with asyncio.timeout(5):
            await fake.ended.wait()


async def test_disk_full_refuses_before_any_token() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        served.sink.full = True
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body())
        assert (response.status_code, code(response)) == (503, "recording_unavailable")
        assert response.headers["retry-after"] == "10"
        assert not fake.received
        assert not served.sink.rows
        served.sink.full = False
        await served.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_disk_that_fills_during_an_answer_ends_it_with_an_error(stream: bool) -> None:
    fill = asyncio.Event()

    async def script(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "a"}), 1))
        await fill.wait()
        await out.send(harness.DONE)
        await out.finish()

    async with harness.one_replica(script) as (served, fake):
        async with http(served) as session:
            asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body(stream=stream)))
            await harness.until(lambda: fake.running > 0)
            served.sink.full = True
            fill.set()
            response = await asked
        assert "recording_unavailable" in response.text
        assert "[DONE]" not in response.text
        assert response.status_code == (200 if stream else 503)
        served.sink.full = False
        await served.idle()


async def test_no_replica_waits_for_one_that_starts() -> None:
    async with (
        harness.one_replica(harness.hello, replica={"state": fleet.ReplicaState.STARTING}) as (
            served,
            _,
        ),
        http(served) as session,
    ):
        asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body()))
        await harness.until(served.waiting)
        assert served.fleet.demand[0].oldest_wait_s > 0
        view = served.fleet.view()
        assert view is not None
        up = dataclasses.replace(view.replicas[0], state=fleet.ReplicaState.SERVING)
        served.fleet.set(dataclasses.replace(view, revision=2, replicas=(up,)))
        assert (await asked).status_code == 200


async def test_no_replica_at_all_is_503_after_the_grace_time() -> None:
    async with harness.gateway(harness.make_view([]), no_replica_grace_s=0.1) as served:
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body())
        assert (response.status_code, code(response)) == (503, "no_replica")
        assert response.headers["retry-after"] == "5"
        assert [row.outcome for row in served.closed()] == [usage.Outcome.REFUSED]


async def test_expired_wait_is_504_and_a_full_queue_429() -> None:
    async with harness.one_replica(
        harness.hello, replica={"state": fleet.ReplicaState.STARTING}, queue_interactive=1
    ) as (served, fake):
        async with http(served) as session:
            first = asyncio.create_task(
                session.post(
                    CHAT, json=harness.chat_body(), headers={"X-Forebay-Deadline-Ms": "600"}
                )
            )
            await harness.until(served.waiting)
            second = await session.post(CHAT, json=harness.chat_body())
            assert (second.status_code, code(second)) == (429, "overloaded")
            assert int(second.headers["retry-after"]) >= 1
            expired = await first
        assert (expired.status_code, code(expired)) == (504, "deadline_exceeded")
        assert sorted(row.outcome for row in served.closed()) == [
            usage.Outcome.EXPIRED,
            usage.Outcome.REFUSED,
        ]
        assert not fake.received


async def test_before_the_first_view_nothing_is_ready() -> None:
    async with harness.gateway(None) as served, http(served) as session:
        assert (await session.get("/health")).status_code == 503
        response = await session.post(CHAT, json=harness.chat_body())
        assert (response.status_code, code(response)) == (503, "no_replica")
        served.fleet.set(harness.make_view([]))
        assert (await session.get("/health")).status_code == 200


async def test_shutdown_lets_answers_end_and_ends_the_rest_with_an_error() -> None:
    release = asyncio.Event()

    async def script(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "a"}), 1))
        if received.body["max_tokens"] == 1:
            await release.wait()
            await out.send(harness.DONE)
            await out.finish()
        else:
            await out.gone()

    async with harness.one_replica(script, drain_s=0.5) as (served, fake):
        async with http(served) as session:
            asked = [
                asyncio.create_task(
                    session.post(CHAT, json=harness.chat_body(stream=True, max_tokens=n))
                )
                for n in (1, 2)
            ]
            await harness.until(lambda: fake.running == 2)
            served.stop.set()
            release.set()
            good, cut = [(await task).text for task in asked]
        assert good.endswith("data: [DONE]\n\n")
        assert "going down" in cut
        assert "[DONE]" not in cut
        await asyncio.wait({served.task})
        rows = {row.outcome: row for row in served.closed()}
        assert set(rows) == {usage.Outcome.OK, usage.Outcome.CANCELLED}
        assert rows[usage.Outcome.CANCELLED].payer is usage.Payer.PLATFORM
        assert served.sink.synced == len(served.sink.rows)


async def test_unknown_engine_error_is_internal() -> None:
    async def fails(received: harness.Received, out: harness.Out) -> None:
        await out.error(frames.Error("weird", "engine said so", 500))

    async with harness.one_replica(fails) as (served, _):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body())
        assert (response.status_code, code(response)) == (500, errors.Internal.code)
        assert [row.payer for row in served.closed()] == [usage.Payer.PLATFORM]


async def test_client_that_reads_nothing_keeps_no_seat() -> None:
    async def floods(received: harness.Received, out: harness.Out) -> None:
        frame = harness.data(harness.chat_event({"content": "x" * 100_000}), 1)
        while not out.left.done():
            await out.send(frame)
        await out.gone()

    async with harness.one_replica(floods, client_stall_s=0.3) as (served, fake):
        host, port = served.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(harness.chat_body(stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(10):
            await fake.ended.wait()
        (row,) = await served.rows(1)
        assert row.outcome is usage.Outcome.CANCELLED
        assert "not read" in row.reason
        await served.idle()
        writer.transport.abort()
        assert not reader.at_eof()
