"""Seats in the stack before an engine's app: departures, rung 0, full, roles and drains."""

import asyncio
import dataclasses
from typing import Any

import pytest
from starlette import types

from engines.replica import engine
from scheduler.contracts import frames, usage
from tests.unit.engines import asgi, scripted


@pytest.mark.parametrize("script", [scripted.endless, scripted.silent])
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize(("batch_job_id", "payer"), [(0, "team"), (7, "platform")])
async def test_a_client_that_leaves_frees_the_seat_and_leaves_a_row(
    sink: usage.MemorySink, script: scripted.Script, framed: bool, batch_job_id: int, payer: str
) -> None:
    inner, app = scripted.build(script, sink)
    call = asgi.Call()
    who = dataclasses.replace(asgi.identity(), batch_job_id=batch_job_id)
    task = asyncio.create_task(asgi.post(app, who, framed=framed, call=call))
    await inner.started.wait()
    await asyncio.sleep(0)
    call.left.set()
    await task
    assert (inner.aborted, inner.running, len(inner.taps)) == (["r1"], set(), 0)
    (row,) = asgi.rows(sink)
    assert (row.outcome, row.output_tokens, row.payer) == ("client_gone", 2, payer)
    state = (await asgi.run(app, "GET", "/forebay/state", asgi.headers())).json
    assert state["stats"]["interactive"] == 0


@pytest.mark.parametrize("script", [scripted.endless, scripted.silent])
async def test_interactive_takes_a_batch_seat_and_the_batch_line_keeps_its_tokens(
    sink: usage.MemorySink, script: scripted.Script
) -> None:
    inner, app = scripted.build(script, sink, seats=1, reserved=0)
    batch = asyncio.create_task(asgi.post(app, asgi.identity("b", "batch")))
    await inner.started.wait()
    await asyncio.sleep(0)
    inner.script = scripted.whole
    spike = await asgi.post(app, asgi.identity("i"))
    assert spike.end.finish_reasons == ("stop",)
    call = await batch
    assert call.error.code == "preempted"
    assert call.all[0] == frames.Frame.of(frames.Kind.PROMPT, b"", (1, 2, 3))
    data = [frame for frame in call.all if frame.kind is frames.Kind.DATA]
    known = b"".join(frame.packed for frame in data) + data[-1].ahead
    assert frames.unpack(known)[:1] == (10,), "what was sampled and never sent is told too"
    assert (call.error.prompt_tokens, call.error.output_tokens) == (3, 2)
    lost, won = asgi.rows(sink)
    assert (lost.outcome, lost.payer, lost.output_tokens) == ("preempted", "platform", 2)
    assert won.outcome == "ok"
    stats = (await asgi.run(app, "GET", "/forebay/state", asgi.headers())).json["stats"]
    assert (stats["preempted_total"], len(stats["reclaim_ms"])) == (1, 1)


async def test_a_line_that_was_preempted_twice_keeps_its_seat_while_another_has_one(
    sink: usage.MemorySink,
) -> None:
    inner, app = scripted.build(scripted.endless, sink, seats=2, reserved=0)

    async def begin(who: usage.Identity, preempted: int = 0) -> "asyncio.Task[asgi.Call]":
        inner.started.clear()
        task = asyncio.create_task(asgi.post(app, who, preempted=preempted))
        await inner.started.wait()
        await asyncio.sleep(0)
        return task

    once = await begin(asgi.identity("once", "batch"), 1)
    twice = await begin(asgi.identity("twice", "batch"), 2)  # the younger one
    person = await begin(asgi.identity("person"))
    assert (await once).error.code == "preempted"
    assert inner.aborted == ["once"]
    other = await begin(asgi.identity("other"))
    assert (await twice).error.code == "preempted", "interactive work goes first all the same"
    for task in (person, other):
        task.cancel()
    await asyncio.gather(person, other, return_exceptions=True)


async def test_full_says_so_with_stats_before_anything(sink: usage.MemorySink) -> None:
    inner, app = scripted.build(scripted.endless, sink, seats=1, reserved=0)
    call = asgi.Call()
    first = asyncio.create_task(asgi.post(app, asgi.identity("a"), call=call))
    await inner.started.wait()
    full = await asgi.post(app, asgi.identity("b"))
    assert (full.status, full.json["error"]["code"]) == (429, "replica_full")
    assert (full.json["stats"]["seats"], full.json["stats"]["interactive"]) == (1, 1)
    again = await asgi.post(app, asgi.identity("a"))
    assert again.status == 429
    assert "still leaving" in again.json["error"]["message"]
    call.left.set()
    await first
    assert len(asgi.rows(sink)) == 1


async def test_role_abort_drain(sink: usage.MemorySink) -> None:
    inner, app = scripted.build(scripted.endless, sink, seats=3, reserved=0)
    given = asgi.headers()

    async def post(path: str, body: Any) -> asgi.Call:
        return await asgi.run(app, "POST", path, given, body)

    batch = asyncio.create_task(asgi.post(app, asgi.identity("b", "batch")))
    await inner.started.wait()
    inner.started.clear()
    person = asyncio.create_task(asgi.post(app, asgi.identity("i")))
    await inner.started.wait()
    await asyncio.sleep(0)
    assert (await post("/forebay/role", {"role": "interactive"})).json == {
        "role": "interactive",
        "aborted": 1,
    }
    assert (await batch).error.code == "preempted"
    assert (await asgi.post(app, asgi.identity("b2", "batch"))).status == 429
    assert (await post("/forebay/role", {"role": "king"})).status == 400
    assert (await post("/forebay/role", [1])).status == 400
    assert (await post("/forebay/abort", {"request_id": "i", "attempt": 2})).json == {
        "aborted": False
    }
    assert (await post("/forebay/abort", {"request_id": "i", "attempt": 1})).json == {
        "aborted": True
    }
    assert (await person).error.code == "cancelled"
    assert asgi.rows(sink)[-1].outcome == "cancelled"
    assert (await post("/forebay/drain", {})).json["draining"] is True
    assert (await asgi.post(app, asgi.identity("j"))).json["error"]["message"].endswith("draining")


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 429), ("/v1/embeddings", 200)])
async def test_batch_waits_for_prompts_of_what_generates_alone(
    sink: usage.MemorySink, path: str, status: int
) -> None:
    """An embedding is a prompt all its life: beside people who always ask for some batch never entered."""
    ends = asyncio.Event()

    async def reading(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        if key == "a":
            await ends.wait()
        await scripted.begin(send, "application/json")
        await scripted.part(send, b"{}", more=False)

    inner, app = scripted.build(reading, sink, seats=8)
    inner.steps = 1
    given = asgi.headers(asgi.identity("a"), framed=False)
    person = asyncio.create_task(asgi.run(app, "POST", path, given, {"input": "x"}))
    await inner.started.wait()
    line = asgi.headers(asgi.identity("b", "batch"), framed=False)
    call = await asgi.run(app, "POST", path, line, {"input": "y"})
    assert call.status == status
    ends.set()
    await person
