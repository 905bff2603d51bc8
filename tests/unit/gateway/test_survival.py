"""Streams whose replica dies: what the client sees, what the next replica is asked, what the rows say."""

import asyncio
import contextlib
import dataclasses
import json
from typing import Any, ClassVar

import grpc
import httpx
import pytest

from gateway import placing
from scheduler.contracts import errors, frames, resume, usage
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.unit.gateway import harness
from tests.unit.gateway.asking import http, two

CHAT = "/v1/chat/completions"
BEGIN = frames.Frame.of(frames.Kind.PROMPT, token_ids=(1, 2, 3, 4, 5), chars=2)
AGAIN = frames.Frame.of(frames.Kind.PROMPT, chars=4)  # of a resumed attempt: 4 tokens were cached


def token(text: str, *ids: int, ahead: tuple[int, ...] = ()) -> frames.Frame:
    payload = harness.chat_event({"content": text}) if text else b""
    return frames.Frame.of(frames.Kind.DATA, payload, ids, 0, len(text), ahead)


def text(body: str) -> str:
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


async def dies(received: harness.Received, out: harness.Out) -> None:
    """Send ``Hello``, with one token more whose text is held back, and die."""
    await out.send(BEGIN, harness.data(harness.chat_event({"role": "assistant", "content": ""})))
    await out.send(token("Hel", 7), token("lo", 8, ahead=(9,)))
    await out.reset()


async def leaves(received: harness.Received, out: harness.Out) -> None:
    """Send the same, then leave as planned; nothing new is taken."""
    if resume.FIELD in received.body:
        await out.json(429, {"error": {"code": "replica_full", "message": "draining"}, "stats": {}})
        return
    await out.send(BEGIN, token("Hel", 7), token("lo", 8))
    told = errors.Draining("its time to drain is up")
    await out.send(token("", ahead=(9,)))
    await out.error(frames.Error(told.code, told.message, told.status, 5, 2, 4))


async def goes_on(received: harness.Received, out: harness.Out) -> None:
    await out.send(AGAIN, token(" world", 9, 10))
    await out.send(harness.data(harness.chat_event({}, "stop"), 11), harness.DONE)
    await out.finish(prompt=5, cached=2, output=5)


@pytest.mark.parametrize("first", [dies, leaves])
async def test_the_client_notices_nothing_and_the_rows_add_up(first: harness.Script) -> None:
    async with two(first, goes_on) as (served, one, other):
        async with http(served) as session:
            body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert text(body) == "Hello world"
        assert body.endswith("data: [DONE]\n\n")
        assert "error" not in body
        asked = other.received[-1]
        begun = resume.Resume.from_json(asked.body[resume.FIELD])
        assert begun == resume.Resume((1, 2, 3, 4, 5), (7, 8, 9), 2, 5, 1, 2)
        assert resume.FIELD not in one.received[0].body
        rows = sorted(served.closed(), key=lambda row: row.identity.attempt)
        lost, won = rows[0], rows[-1]
        assert {row.outcome for row in rows[1:-1]} <= {usage.Outcome.REFUSED}
        assert (lost.outcome, lost.payer) == (usage.Outcome.REPLICA_LOST, usage.Payer.TEAM)
        assert (lost.uncached_prompt_tokens, lost.cached_prompt_tokens) == (3, 2)
        assert lost.output_tokens == 3
        assert lost.waste_tokens == (1 if first is leaves else 0)  # sampled, and never told
        assert (won.outcome, won.payer) == (usage.Outcome.OK, usage.Payer.TEAM)
        assert (won.uncached_prompt_tokens, won.cached_prompt_tokens) == (0, 0)
        assert won.output_tokens == 2
        assert won.waste_tokens == 5 + 3 - 4  # prompt and tokens so far, less what was cached
        await served.idle()


async def test_a_replica_that_leaves_is_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the fleet's view tells, a leaving replica would turn the same request away without end."""
    monkeypatch.setattr(placing, "SUSPECT_S", 0.2)
    now = asyncio.get_running_loop().time
    asked: list[float] = []

    async def turns_away(received: harness.Received, out: harness.Out) -> None:
        asked.append(now())
        if len(asked) == 3:
            await harness.hello(received, out)
            return
        told = errors.Draining("its time to drain is up")
        await out.error(frames.Error(told.code, told.message, told.status, 0, 0, 0))

    async with harness.one_replica(turns_away) as (served, _), http(served) as session:
        body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert text(body) == "Hello world"
        first, second, third = asked
        assert min(second - first, third - second) > 0.19
        await served.idle()


@pytest.mark.parametrize(("first", "failed"), [(dies, [True, False]), (leaves, [False])])
async def test_a_replica_that_leaves_as_planned_says_nothing_against_its_version(
    first: harness.Script, failed: list[bool]
) -> None:
    """Its streams would all fail at once, and a rollout would go back for the end of a lease."""

    async def compared(received: harness.Received, out: harness.Out) -> None:
        view = served.fleet.view()
        assert view is not None
        route = dataclasses.replace(view.routes["chat"], shadow="2")
        served.fleet.set(dataclasses.replace(view, revision=3, routes={"chat": route}))
        await asyncio.sleep(0.5)  # the gateway follows routes now and then
        await first(received, out)

    async with two(compared, goes_on) as (served, _, _), http(served) as session:
        body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert text(body) == "Hello world"
        await harness.until(lambda: len(served.fleet.trials) >= len(failed))  # told by and by
        assert [trial.failed for trial in served.fleet.trials] == failed
        # Told as one event with all else that the replica had.
        assert [bool(trial.death) for trial in served.fleet.trials] == failed


async def test_a_resumed_stream_is_counted_once_more() -> None:
    async with two(dies, goes_on) as (served, _, _):
        async with http(served) as session:
            await session.post(CHAT, json=harness.chat_body(stream=True))
            metrics = (await session.get("/metrics")).text
        assert 'forebay_streams_resumed_total{model="chat",tier="interactive"} 1.0' in metrics


async def test_over_grpc_too_g4() -> None:
    """G4: ids of held-back text reach the client once, with their text."""
    async with (
        two(dies, goes_on) as (served, _, _),
        grpc.aio.insecure_channel(served.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        call = forebay_pb2_grpc.InferenceStub(channel).Generate(
            forebay_pb2.GenerateRequest(
                model="chat",
                messages=[forebay_pb2.Message(role="user", content="hi")],
                max_tokens=9,
            ),
            metadata=(("authorization", "Bearer ann"),),
        )
        chunks = [chunk async for chunk in call]
    assert "".join(chunk.text for chunk in chunks) == "Hello world"
    assert [n for chunk in chunks for n in chunk.token_ids] == [7, 8, 9, 10, 11]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert chunks[-1].usage.prompt_tokens == 5
    assert chunks[-1].usage.completion_tokens == 5


async def test_a_request_that_kills_two_replicas_is_set_aside() -> None:
    async with two(dies, dies) as (served, one, other):
        async with http(served) as session:
            body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        assert "set aside" in body
        assert "[DONE]" not in body
        assert len(one.received) + len(other.received) == 2
        first, second = sorted(served.closed(), key=lambda row: row.identity.attempt)
        assert (first.payer, second.payer) == (usage.Payer.PLATFORM, usage.Payer.PLATFORM)
        await served.idle()


async def test_a_request_that_the_engine_chokes_on_leaves_its_replicas_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine's own 5xx: two tries, and neither replica is suspected for it."""
    monkeypatch.setattr(placing, "SUSPECT_S", 600.0)

    async def chokes(received: harness.Received, out: harness.Out) -> None:
        if received.body["max_tokens"] == 13:
            await out.json(500, {"error": {"message": "odd", "code": 500}})
        else:
            await harness.hello(received, out)

    async with harness.one_replica(chokes) as (served, fake), http(served) as session:
        odd = await session.post(CHAT, json=harness.chat_body(max_tokens=13))
        assert (odd.status_code, len(fake.received)) == (502, 2)
        assert "set aside" in odd.text
        async with asyncio.timeout(60):  # a suspected replica would not be asked
            good = await session.post(CHAT, json=harness.chat_body(max_tokens=5))
        assert good.status_code == 200


@pytest.mark.parametrize("why", ["n is above 1", "its sampling is seeded"])
async def test_what_cannot_be_resumed_ends_in_an_explicit_error(why: str) -> None:
    async def final(received: harness.Received, out: harness.Out) -> None:
        await out.send(frames.Frame.of(frames.Kind.PROMPT, why.encode(), (1, 2)), token("a", 7))
        await out.reset()

    async with two(final, goes_on) as (served, _, other):
        async with http(served) as session:
            body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        last = json.loads(body.splitlines()[-2][6:])
        assert last["error"]["code"] == "replica_lost"
        assert why in last["error"]["message"]
        assert "[DONE]" not in body
        assert not other.received


async def test_a_whole_answer_goes_on_from_what_a_leaving_replica_told() -> None:
    async def half(received: harness.Received, out: harness.Out) -> None:
        await out.send(BEGIN, token("", ahead=(7, 8)))
        await out.error(frames.Error("draining", "leaves", 502, 5, 0, 2))

    async with two(half, harness.hello) as (served, _, other):
        async with http(served) as session:
            response = await session.post(CHAT, json=harness.chat_body())
        assert response.json()["choices"][0]["message"]["content"] == "Hello world"
        begun = resume.Resume.from_json(other.received[0].body[resume.FIELD])
        assert (begun.token_ids, begun.chars, begun.created) == ((7, 8), 0, 0)


class TestBatch:
    """The gateway never resumes tier batch: its runner does, from what it was told."""

    LINE: ClassVar[dict[str, str]] = {
        "X-Forebay-Batch-Job": "7",
        "X-Forebay-Team": "physics",
        "X-Forebay-User": "ann",
    }

    @contextlib.asynccontextmanager
    async def service(self, served: harness.Served) -> Any:
        headers = {"Authorization": "Bearer svc", **self.LINE}
        async with httpx.AsyncClient(
            base_url=served.http, headers=headers, trust_env=False, verify=False, timeout=20
        ) as session:
            yield session

    async def test_a_preempted_line_comes_back_with_its_tokens(self) -> None:
        async def preempted(received: harness.Received, out: harness.Out) -> None:
            await out.send(BEGIN, token("", ahead=(7, 8)))
            await out.error(frames.Error("preempted", "gave its seat", 503, 5, 0, 2))

        async with harness.one_replica(preempted) as (served, _):
            async with self.service(served) as session:
                response = await session.post(CHAT, json=harness.chat_body())
            told = response.json()
            assert (response.status_code, told["error"]["code"]) == (503, "preempted")
            begun = resume.Resume.from_json(told[resume.FIELD])
            assert (begun.prompt_token_ids, begun.token_ids) == ((1, 2, 3, 4, 5), (7, 8))
            (row,) = served.closed()
            assert (row.payer, row.output_tokens) == (usage.Payer.PLATFORM, 2)

    async def test_a_line_goes_on_from_the_runners_journal_at_the_teams_cost(self) -> None:
        begun = resume.Resume((1, 2, 3, 4, 5), (7, 8))
        async with harness.one_replica(harness.hello) as (served, fake):
            async with self.service(served) as session:
                body = harness.chat_body(**{resume.FIELD: begun.to_json()})
                response = await session.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            assert resume.Resume.from_json(fake.received[0].body[resume.FIELD]) == begun
            (row,) = served.closed()
            assert (row.uncached_prompt_tokens, row.output_tokens, row.waste_tokens) == (5, 3, 0)

    async def test_a_replica_that_computed_nothing_takes_nothing_off_a_lines_bill(self) -> None:
        """The journal's beginning is in no row that the team pays, whoever refuses it at first."""

        async def fails(received: harness.Received, out: harness.Out) -> None:
            await out.json(503, {"error": {"message": "not now"}})

        begun = resume.Resume((1, 2, 3, 4, 5), (7, 8), cached_tokens=2)
        async with two(fails, harness.hello) as (served, one, other):
            async with self.service(served) as session:
                body = harness.chat_body(**{resume.FIELD: begun.to_json()})
                response = await session.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            for fake in (one, other):
                assert resume.Resume.from_json(fake.received[0].body[resume.FIELD]) == begun
            lost, won = sorted(served.closed(), key=lambda row: row.identity.attempt)
            assert (lost.outcome, lost.output_tokens) == (usage.Outcome.REPLICA_LOST, 0)
            assert (won.uncached_prompt_tokens, won.output_tokens, won.waste_tokens) == (5, 3, 0)

    @pytest.mark.parametrize("why", ["preempted", "reset"])
    async def test_a_try_that_comes_to_nothing_counts_what_it_computed_itself(
        self, why: str
    ) -> None:
        async def goes_on_and_ends(received: harness.Received, out: harness.Out) -> None:
            await out.send(AGAIN, token("", 9))
            if why == "reset":
                await out.reset()
            else:
                await out.error(frames.Error("preempted", "gave its seat", 503, 7, 4, 1))

        begun = resume.Resume((1, 2, 3, 4, 5), (7, 8), 2, cached_tokens=2)
        async with harness.one_replica(goes_on_and_ends) as (served, _):
            async with self.service(served) as session:
                body = harness.chat_body(**{resume.FIELD: begun.to_json()})
                assert (await session.post(CHAT, json=body)).status_code >= 500
            (row,) = served.closed()
            assert (row.payer, row.output_tokens) == (usage.Payer.PLATFORM, 1)
            assert (row.uncached_prompt_tokens, row.cached_prompt_tokens) == (3, 4)

    async def test_a_line_whose_runner_dies_is_paid_once_when_the_next_one_has_it_whole(
        self,
    ) -> None:
        async def hangs(received: harness.Received, out: harness.Out) -> None:
            if resume.FIELD in received.body:
                await harness.hello(received, out)
                return
            await out.send(BEGIN, token("", 7, 8))
            sent.set()
            await out.gone()

        sent = asyncio.Event()
        begun = resume.Resume((1, 2, 3, 4, 5), (7, 8), cached_tokens=2)
        again = harness.chat_body(**{resume.FIELD: begun.to_json()})
        async with harness.one_replica(hangs) as (served, _):
            async with self.service(served) as session:
                asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body()))
                await sent.wait()
                await asyncio.sleep(0.05)  # the gateway has them as well
                asked.cancel()
                await asyncio.wait({asked})
            await served.idle()
            async with self.service(served) as session:
                assert (await session.post(CHAT, json=again)).status_code == 200
            left, whole = sorted(served.closed(), key=lambda row: row.identity.arrived_us)
            assert (left.outcome, left.output_tokens) == (usage.Outcome.CLIENT_GONE, 2)
            assert (left.payer, whole.payer) == (usage.Payer.PLATFORM, usage.Payer.TEAM)
            assert (whole.uncached_prompt_tokens, whole.output_tokens) == (5, 3)

    async def test_nobody_elses_word_on_a_beginning_is_heard(self) -> None:
        async with harness.one_replica(harness.hello) as (served, fake):
            async with http(served) as session:
                body = harness.chat_body(**{resume.FIELD: {"prompt_token_ids": [1]}})
                response = await session.post(CHAT, json=body)
            assert response.status_code == 200
            assert not [r for r in fake.received if resume.FIELD in r.body]

    async def test_a_beginning_that_is_none_is_refused(self) -> None:
        async with harness.one_replica(harness.hello) as (served, fake):
            async with self.service(served) as session:
                body = harness.chat_body(**{resume.FIELD: {"token_ids": "x"}})
                response = await session.post(CHAT, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, resume.FIELD)
            assert not fake.received


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_ends_the_answer_and_the_sequence(stream: bool) -> None:
    async with harness.one_replica(harness.hang) as (served, fake):
        async with http(served) as session:
            response = await session.post(
                CHAT,
                json=harness.chat_body(stream=stream),
                headers={"X-Forebay-Deadline-Ms": "300"},
            )
        assert "deadline_exceeded" in response.text
        assert "[DONE]" not in response.text
        assert response.status_code == (200 if stream else 504)
        async with asyncio.timeout(20):
            await fake.ended.wait()
        (row,) = await served.rows(1)
        assert (row.outcome, row.payer) == (usage.Outcome.EXPIRED, usage.Payer.TEAM)
        assert row.output_tokens == int(stream)
        await served.idle()
