"""Replicas that die or refuse, clients that leave, full disks: what is told and recorded."""

import asyncio
import dataclasses
import itertools
import json

import pytest

from scheduler.contracts import errors, fleet, frames, usage
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.asking import code, http

CHAT = "/v1/chat/completions"


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
            async with asyncio.timeout(20):
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
            asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body()))
            await harness.until(served.waiting)
            asked.cancel()
            await asyncio.wait({asked})
        (row,) = await served.rows(1)
        assert (row.outcome, row.output_tokens) == (usage.Outcome.CLIENT_GONE, 0)
        assert row.identity.replica_id == ""
        assert not fake.received
        await served.idle()


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


async def test_batch_headers_of_others_are_not_heard() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        async with http(served) as session:
            forged = {"X-Forebay-Team": "chem", "X-Forebay-Batch-Job": "12"}
            assert (await session.post(CHAT, json=harness.chat_body(), headers=forged)).is_success
        identity = served.closed()[0].identity
        assert (identity.team, identity.batch_job_id) == ("physics", 0)


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
    async with harness.gateway(fleets.make_view([]), no_replica_grace_s=0.1) as served:
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
        served.fleet.set(fleets.make_view([]))
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
