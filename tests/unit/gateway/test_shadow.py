"""Shadow traffic: the caller's answer comes from its own version, whatever the shadow does or does not."""

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.contracts import fleet, observed, quota, usage
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.asking import http

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def shadowed(
    shadow: harness.Script,
    script: harness.Script = harness.hello,
    *,
    percent: int = 100,
    replica: dict[str, Any] | None = None,
    seats: int = 8,
    **options: Any,
) -> AsyncIterator[tuple[harness.Served, harness.FakeReplica, harness.FakeReplica]]:
    """Serve version 1 for callers and version 2 as its shadow."""
    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(script, "r1").listening() as one,
            harness.FakeReplica(shadow, "r2").listening() as other,
        ):
            replicas = [
                one.replica(Path(name), seats=seats, reserved_seats=0),
                other.replica(Path(name), version="2", **(replica or {})),
            ]
            view = fleets.make_view(replicas, shadow="2", shadow_percent=percent)
            async with harness.gateway(view, **options) as served:
                yield served, one, other


def rows_of(served: harness.Served, version: str) -> list[usage.UsageRow]:
    return [row for row in served.closed() if row.identity.version == version]


async def copied(served: harness.Served, count: int = 1) -> list[observed.Copied]:
    await harness.until(lambda: len(served.fleet.copies) >= count)
    return served.fleet.copies


async def dropped(served: harness.Served) -> dict[str, int]:
    await harness.until(lambda: bool(served.fleet.dropped))
    return {one.reason: one.count for one in served.fleet.dropped}


def said(word: str) -> harness.Script:
    async def answer(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.PROMPT, harness.data(harness.chat_event({"content": word}), 7))
        await out.send(harness.data(harness.chat_event({}, "stop"), 9), harness.DONE)
        await out.finish(output=2)

    return answer


@pytest.mark.parametrize("stream", [True, False])
async def test_a_copy_is_answered_compared_and_charged_to_the_platform(stream: bool) -> None:
    async with shadowed(harness.hello) as (served, one, other), http(served) as session:
        body = harness.chat_body(stream=stream, temperature=0)
        answer = await session.post(CHAT, json=body)
        assert answer.status_code == 200
        (found,) = await copied(served)
        assert (found.model, found.version, found.shadow) == ("chat", "1", "2")
        assert found.match is observed.Match.SAME
        assert not found.caller.failed
        assert not found.copy.failed
        assert (found.caller.tokens, found.copy.tokens) == (3, 3)
        assert found.caller.ttft_ms > 0
        assert found.copy.total_ms >= found.copy.ttft_ms > 0
        (theirs,) = rows_of(served, "1")
        (ours,) = rows_of(served, "2")
        assert (theirs.identity.team, theirs.payer) == ("physics", usage.Payer.TEAM)
        assert (ours.identity.team, ours.identity.user) == ("forebay", "shadow")
        assert (ours.payer, ours.identity.tier) == (usage.Payer.PLATFORM, "batch")
        assert ours.identity.caller_request_id == theirs.identity.request_id
        assert answer.headers["x-request-id"] == theirs.identity.request_id
        assert other.received[0].body == one.received[0].body
        assert other.received[0].identity.request_id == ours.identity.request_id
        metrics = (await session.get("/metrics")).text
        wanted = 'forebay_shadow_copies_total{model="chat",result="same",version="2"} 1.0'
        assert wanted in metrics
        assert 'forebay_output_tokens_total{model="chat",tier="shadow"} 3.0' in metrics
        await served.idle()


async def test_other_words_are_told_and_sampled_ones_are_not_compared() -> None:
    async with shadowed(said("Goodbye")) as (served, _, _), http(served) as session:
        await session.post(CHAT, json=harness.chat_body(stream=True, temperature=0))
        await session.post(CHAT, json=harness.chat_body(stream=True))
        found = await copied(served, 2)
        assert {one.match for one in found} == {observed.Match.DIFFERS, observed.Match.UNKNOWN}
        assert found[0].copy.tokens == 2


async def cuts(received: harness.Received, out: harness.Out) -> None:
    await out.send(harness.PROMPT, harness.data(harness.chat_event({"content": "a"}), 7))
    await out.reset()


async def refuses(received: harness.Received, out: harness.Out) -> None:
    await out.json(400, {"error": {"message": "what is this", "code": 400}})


async def breaks(received: harness.Received, out: harness.Out) -> None:
    await out.json(500, {"error": {"message": "broken", "code": 500}})


@pytest.mark.parametrize("shadow", [cuts, refuses, breaks])
async def test_a_shadow_that_fails_is_seen_by_nobody(shadow: harness.Script) -> None:
    async with shadowed(shadow) as (served, one, other), http(served) as session:
        answer = await session.post(CHAT, json=harness.chat_body(stream=True))
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "error" not in answer.text
        (found,) = await copied(served)
        assert (found.caller.failed, found.copy.failed) == (False, True)
        (ours,) = rows_of(served, "2")
        assert ours.payer is usage.Payer.PLATFORM
        assert len(one.received) == len(other.received) == 1  # it is not tried again
        await served.idle()


async def test_a_shadow_that_hangs_holds_up_nobody_and_is_ended() -> None:
    async with (
        shadowed(harness.hang, shadow_limit_s=0.3) as (served, _, other),
        http(served) as session,
    ):
        async with asyncio.timeout(30):
            answer = await session.post(CHAT, json=harness.chat_body(stream=True))
        assert answer.text.endswith("data: [DONE]\n\n")
        (found,) = await copied(served)
        assert found.copy.failed
        (ours,) = rows_of(served, "2")
        assert ours.outcome is usage.Outcome.EXPIRED
        await harness.until(lambda: served.sink.synced == len(served.sink.rows), 5.0)
        await harness.until(lambda: not other.running)
        await served.idle()


async def test_a_long_answer_of_the_shadow_is_not_kept() -> None:
    async def endless(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.PROMPT)
        for _ in range(400):
            await out.send(harness.data(harness.chat_event({"content": "x" * 1000}), 7))
        await out.send(harness.data(harness.chat_event({}, "stop"), 9), harness.DONE)
        await out.finish(output=401)

    async with shadowed(endless, shadow_answer_bytes=4096) as (served, _, _):
        async with http(served) as session:
            await session.post(CHAT, json=harness.chat_body(stream=True, temperature=0))
        (found,) = await copied(served)
        assert (found.match, found.copy.tokens) == (observed.Match.UNKNOWN, 401)


@pytest.mark.parametrize(
    ("options", "replica", "reason"),
    [
        ({"shadow_in_flight": 0}, {}, "gateway_busy"),
        ({"shadow_bytes": 1000}, {}, "gateway_busy"),
        ({}, {"seats": 2, "reserved_seats": 2}, "busy"),  # none that batch could have
        ({}, {"role": fleet.Role.INTERACTIVE}, "busy"),
        ({"no_replica_grace_s": 0}, {"state": fleet.ReplicaState.STOPPED}, "no_replica"),
    ],
)
async def test_without_room_for_it_a_copy_is_dropped(
    options: dict[str, Any], replica: dict[str, Any], reason: str
) -> None:
    async with (
        shadowed(harness.hello, replica=replica, **options) as (served, _, other),
        http(served) as session,
    ):
        answer = await session.post(CHAT, json=harness.chat_body(stream=True))
        assert answer.status_code == 200
        assert await dropped(served) == {reason: 1}
        assert other.received == []
        assert rows_of(served, "2") == []
        await served.idle()


async def test_a_replica_that_says_full_drops_the_copy() -> None:
    async def full(received: harness.Received, out: harness.Out) -> None:
        await out.json(429, {"error": {"code": "replica_full", "message": "full"}, "stats": {}})

    async with shadowed(full) as (served, _, _), http(served) as session:
        await session.post(CHAT, json=harness.chat_body(stream=True))
        assert await dropped(served) == {"busy": 1}
        await served.idle()


async def test_a_caller_that_leaves_ends_its_copy() -> None:
    async with (
        shadowed(harness.hang, harness.hang) as (served, _, other),
        http(served) as session,
    ):
        with contextlib.suppress(httpx.HTTPError):
            async with session.stream("POST", CHAT, json=harness.chat_body(stream=True)) as answer:
                async for _ in answer.aiter_bytes():
                    await harness.until(lambda: bool(other.running))
                    break
        assert await dropped(served) == {"caller_left": 1}
        await harness.until(lambda: not other.running)
        await served.idle()


async def test_who_is_not_copied() -> None:
    """Batch lines, requests for one version, what the percentage leaves out, and a model without a shadow."""
    async with shadowed(harness.hello, percent=0) as (served, _, other), http(served) as session:
        await session.post(CHAT, json=harness.chat_body())
        view = served.fleet.view()
        assert view is not None
        route = dataclasses.replace(view.routes["chat"], shadow_percent=100)
        served.fleet.set(dataclasses.replace(view, revision=2, routes={"chat": route}))
        await harness.until(lambda: served.fleet.view() is not None)
        for body in ({"forebay_priority": "batch"}, {"forebay_version": "1"}):
            await session.post(CHAT, json=harness.chat_body(**body))
        plain = dataclasses.replace(route, shadow="", shadow_percent=0)
        served.fleet.set(dataclasses.replace(view, revision=3, routes={"chat": plain}))
        await session.post(CHAT, json=harness.chat_body())
        await served.idle()
        assert other.received == []
        assert (served.fleet.copies, served.fleet.dropped) == ([], [])


async def test_a_copy_begins_after_the_callers_replica_has_begun_to_answer() -> None:
    order: list[str] = []
    asked = asyncio.Event()

    async def first(received: harness.Received, out: harness.Out) -> None:
        await asyncio.sleep(0.05)
        order.append("caller")
        await harness.hello(received, out)

    async def second(received: harness.Received, out: harness.Out) -> None:
        order.append("copy")
        asked.set()
        await harness.hello(received, out)

    async with shadowed(second, first) as (served, _, _), http(served) as session:
        await session.post(CHAT, json=harness.chat_body(stream=True))
        await asked.wait()
        assert order == ["caller", "copy"]


class Counting(quota.Unlimited):
    """Quotas that remember who asked."""

    def __init__(self) -> None:
        self.claims: list[quota.Claim] = []

    def reserve(self, claim: quota.Claim) -> quota.Hold:
        self.claims.append(claim)
        return quota.Free()


async def test_no_quota_hears_of_a_copy() -> None:
    quotas = Counting()
    async with shadowed(harness.hello, quotas=quotas) as (served, _, _), http(served) as session:
        await session.post(CHAT, json=harness.chat_body(stream=True))
        await copied(served)
        assert [claim.team for claim in quotas.claims] == ["physics"]


async def test_a_gateway_that_goes_down_waits_for_no_copy() -> None:
    async with shadowed(harness.hang, drain_s=20.0) as (served, _, other), http(served) as session:
        await session.post(CHAT, json=harness.chat_body(stream=True))
        await harness.until(lambda: bool(other.running))
        served.stop.set()
        async with asyncio.timeout(15):
            await served.task
        (ours,) = rows_of(served, "2")
        assert (ours.payer, ours.outcome) == (usage.Payer.PLATFORM, usage.Outcome.CANCELLED)


async def test_a_copy_that_is_ended_takes_nothing_from_a_caller_that_goes_on() -> None:
    """Not even one that has its answer already and waits for the end of the caller's."""
    going = asyncio.Event()

    async def slow(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.PROMPT, harness.data(harness.chat_event({"content": "a"}), 7))
        await going.wait()
        await out.send(harness.data(harness.chat_event({}, "stop"), 9), harness.DONE)
        await out.finish(output=2)

    async with (
        shadowed(harness.hello, slow, drain_s=20.0) as (served, _, other),
        http(served) as session,
    ):
        body = harness.chat_body(stream=True)
        asked = asyncio.create_task(session.post(CHAT, json=body))
        await harness.until(lambda: bool(other.received) and not other.running)
        await harness.until(lambda: served.sink.synced == 3)  # OPEN twice, and CLOSE of the copy
        served.stop.set()
        await asyncio.sleep(0.05)  # the copy is ended by now; if it is not, the test says less
        going.set()
        answer = await asked
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "error" not in answer.text
        await served.task


async def test_a_gateway_that_goes_down_begins_no_copy() -> None:
    going = asyncio.Event()

    async def late(received: harness.Received, out: harness.Out) -> None:
        await going.wait()
        await harness.hello(received, out)

    async with (
        shadowed(harness.hang, late, drain_s=20.0) as (served, one, other),
        http(served) as session,
    ):
        asked = asyncio.create_task(session.post(CHAT, json=harness.chat_body(stream=True)))
        await harness.until(lambda: bool(one.running))
        served.stop.set()
        await asyncio.sleep(0.05)  # it drains by now; if it does not, the test says less
        going.set()
        assert (await asked).text.endswith("data: [DONE]\n\n")
        async with asyncio.timeout(15):
            await served.task
        assert other.received == []


@pytest.mark.parametrize("tier", ["interactive", "batch"])
async def test_a_copy_gives_way_as_soon_as_anybody_waits(tier: str) -> None:
    """Dropped first under load, before batch: whoever waits for its model has it ended."""
    async with (
        shadowed(harness.hang, harness.hang, seats=1) as (served, one, other),
        http(served) as session,
    ):
        body = harness.chat_body(stream=True)
        first = asyncio.create_task(session.post(CHAT, json=body))
        await harness.until(lambda: bool(other.running))
        second = asyncio.create_task(
            session.post(CHAT, json={**body, "forebay_priority": tier, "forebay_version": "1"})
        )
        await harness.until(lambda: not other.running)
        assert await dropped(served) == {"preempted": 1}
        assert (one.running, first.done(), second.done()) == (1, False, False)
        for task in (first, second):
            task.cancel()
        await asyncio.wait({first, second})
        await served.idle()
        (ours,) = rows_of(served, "2")
        assert (ours.outcome, ours.payer) == (usage.Outcome.CANCELLED, usage.Payer.PLATFORM)
