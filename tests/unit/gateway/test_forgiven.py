"""Who pays for the parts of an answer that was not completed; the bill and the quota say the same."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent import futures

import pytest

from accounting import merge
from scheduler.contracts import fleet, frames, resume, usage
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.asking import http, two
from tests.unit.gateway.test_quotas import book, used
from tests.unit.gateway.test_survival import BEGIN, CHAT, dies, goes_on, text, token


async def ends_in_an_error(received: harness.Received, out: harness.Out) -> None:
    await out.json(400, {"error": {"message": "the prompt is too long", "code": 400}})


async def goes_on_and_hangs(received: harness.Received, out: harness.Out) -> None:
    await out.send(BEGIN, token(" world", 9, 10))
    await out.gone()


def billed(rows: Sequence[usage.Row]) -> int:
    """Return the tokens that the team pays for, as the ledger reads the rows."""
    told = merge.merge(row for row in rows if isinstance(row, usage.UsageRow))
    return sum(
        row.uncached_prompt_tokens + row.cached_prompt_tokens + row.output_tokens
        for row in told
        if row.payer is usage.Payer.TEAM
    )


ENDED = (usage.Outcome.CANCELLED, usage.Outcome.EXPIRED)
FATES = (*ENDED, usage.Outcome.PREEMPTED, usage.Outcome.CLIENT_GONE, None)


@pytest.mark.parametrize("fate", FATES, ids=[*FATES[:-1], "nobody knows"])
async def test_a_line_that_is_left_is_its_teams_where_the_team_ended_the_job(
    fate: usage.Outcome | None,
) -> None:
    """It goes on from 2 tokens of a journal, and has 3 more: the platform paid for the tries before."""

    async def hangs(received: harness.Received, out: harness.Out) -> None:
        await out.send(frames.Frame.of(frames.Kind.PROMPT, chars=4))
        await out.send(frames.Frame.of(frames.Kind.DATA, b"", (9, 10, 11)))
        await out.gone()

    def told(job_id: int) -> usage.Outcome:
        assert job_id == 12
        if fate is None:
            raise OSError("the registry is down")
        return fate

    quotas = book(tokens_per_day=1000)
    begun = resume.Resume((1, 2, 3, 4, 5), (7, 8), shown=2, cached_tokens=2)
    body = harness.chat_body(**{resume.FIELD: begun.to_json()})
    headers = {
        "Authorization": "Bearer svc",
        "Accept": frames.MEDIA_TYPE,
        "X-Forebay-Batch-Job": "12",
        "X-Forebay-Team": "physics",
        "X-Forebay-User": "ann",
    }
    async with harness.one_replica(hangs, quotas=quotas, job_fate=told) as (served, _):
        async with (
            http(served) as session,
            session.stream("POST", CHAT, json=body, headers=headers) as answer,
        ):
            decoder, known = frames.Decoder(), 0
            async for piece in answer.aiter_raw():
                known += sum(frame.tokens for frame in decoder.feed(piece))
                if known == 3:
                    break
        await harness.until(lambda: len(served.sink.rows) > 1 and not quotas.open)
        assert billed(served.sink.rows) == used(quotas) == (10 if fate in ENDED else 0)
        (row,) = merge.merge(row for row in served.sink.rows if isinstance(row, usage.UsageRow))
    assert row.outcome is (fate or usage.Outcome.CLIENT_GONE)
    if fate in ENDED:
        assert (row.uncached_prompt_tokens, row.cached_prompt_tokens, row.output_tokens) == (
            3,
            2,
            5,
        )


@pytest.mark.parametrize("fate", FATES[:-1])
async def test_a_line_that_is_left_while_it_waits_says_why_too(fate: usage.Outcome) -> None:
    quotas = book(tokens_per_day=1000)
    headers = {
        "Authorization": "Bearer svc",
        "X-Forebay-Batch-Job": "12",
        "X-Forebay-Team": "physics",
    }
    starting = fleets.make_replica("r1", state=fleet.ReplicaState.STARTING)
    async with (
        harness.gateway(
            fleets.make_view([starting]), quotas=quotas, job_fate=lambda _: fate
        ) as served,
        http(served) as session,
    ):
        asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body(), headers=headers))
        await harness.until(lambda: quotas.open == 1)
        asked.cancel()
        await harness.until(lambda: bool(served.sink.rows) and not quotas.open)
        (row,) = merge.merge(row for row in served.sink.rows if isinstance(row, usage.UsageRow))
        assert row.outcome is fate
        assert billed(served.sink.rows) == used(quotas) == 0


async def test_a_registry_that_hangs_at_that_word_keeps_no_others_thread() -> None:
    """The way to the next broker and the quotas' books need threads too."""
    asked, going = threading.Event(), threading.Event()

    def hangs(job_id: int) -> usage.Outcome:
        asked.set()
        going.wait()
        return usage.Outcome.CLIENT_GONE

    asyncio.get_running_loop().set_default_executor(futures.ThreadPoolExecutor(1))
    headers = {"Authorization": "Bearer svc", "X-Forebay-Batch-Job": "12"}
    async with harness.one_replica(harness.hang, job_fate=hangs) as (served, _):
        async with (
            http(served) as session,
            session.stream(
                "POST", CHAT, json=harness.chat_body(stream=True), headers=headers
            ) as answer,
        ):
            async for _ in answer.aiter_bytes():
                break
        await harness.until(asked.is_set)
        try:
            async with asyncio.timeout(30):
                await asyncio.to_thread(int)
        finally:
            going.set()


@pytest.mark.parametrize(
    ("second", "tokens"),
    [(dies, 0), (ends_in_an_error, 0), (goes_on, 10)],
    ids=["lost twice", "refused elsewhere", "completed"],
)
async def test_a_team_pays_for_whole_answers_alone(second: harness.Script, tokens: int) -> None:
    """Three tokens of a first part, and a second that fails: nothing; that completes: all of both."""
    quotas = book(tokens_per_day=1000)
    async with two(dies, second, quotas=quotas) as (served, _, _), http(served) as session:
        body = (await session.post(CHAT, json=harness.chat_body(stream=True))).text
        await served.idle()
        assert text(body).startswith("Hello")
        assert billed(served.sink.rows) == used(quotas) == tokens
        assert quotas.open == 0
        first = min(served.closed(), key=lambda row: row.identity.attempt)
        assert first.outcome is usage.Outcome.REPLICA_LOST
        assert first.payer is (usage.Payer.TEAM if tokens else usage.Payer.PLATFORM)


async def test_the_lost_part_is_the_platforms_when_the_gateway_stops() -> None:
    quotas = book(tokens_per_day=1000)
    async with two(dies, goes_on_and_hangs, quotas=quotas, drain_s=0.1) as (served, _, other):
        async with http(served) as session:
            asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body(stream=True)))
            await harness.until(lambda: bool(other.received) and other.running > 0)
            served.stop.set()
            body = (await asked).text
        await served.task
        assert "[DONE]" not in body
        assert billed(served.sink.rows) == used(quotas) == 0


async def test_a_client_that_leaves_or_names_a_deadline_pays_for_what_it_got() -> None:
    quotas = book(tokens_per_day=1000)
    async with two(dies, goes_on_and_hangs, quotas=quotas) as (served, _, _):
        async with http(served) as session:
            headers = {"X-Forebay-Deadline-Ms": "1500"}
            body = harness.chat_body(stream=True)
            told = (await session.post(CHAT, json=body, headers=headers)).text
        assert "deadline_exceeded" in told
        assert text(told) == "Hello world"
        await served.idle()
        assert (
            billed(served.sink.rows) == used(quotas) == 5 + 4
        )  # the third token was known ahead of its text
