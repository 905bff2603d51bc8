"""The stack before an engine's app: secret, frames, errors, departures, rows."""

import asyncio
import dataclasses
from typing import Any

import pytest
from starlette import types

from engines.replica import engine, launch
from scheduler.contracts import errors, frames, usage
from tests.unit.engines import asgi, scripted


def rows(sink: usage.MemorySink) -> list[usage.UsageRow]:
    return [row for row in sink.rows if isinstance(row, usage.UsageRow)]


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/forebay/state", "/docs"])
@pytest.mark.parametrize("secret", ["", "wrong", "s3cret2"])
async def test_no_path_answers_without_the_secret(
    sink: usage.MemorySink, path: str, secret: str
) -> None:
    _, app = scripted.build(scripted.whole, sink)
    call = await asgi.run(app, "POST", path, {"authorization": f"Bearer {secret}"}, {})
    assert (call.status, call.json["error"]["code"]) == (401, "invalid_api_key")
    assert (await asgi.run(app, "GET", path, {})).status == 401


async def test_a_stream_becomes_frames_with_the_ids_beside_the_bytes(
    sink: usage.MemorySink,
) -> None:
    _, app = scripted.build(scripted.whole, sink)
    call = await asgi.post(app, asgi.identity())
    assert (call.status, call.headers["content-type"]) == (200, frames.MEDIA_TYPE)
    kinds = [frame.kind for frame in call.all]
    assert kinds == [frames.Kind.PROMPT, *[frames.Kind.DATA] * 3, frames.Kind.END]
    assert call.all[0].token_ids == (1, 2, 3)
    assert [f.token_ids for f in call.all[1:4]] == [(10,), (11,), ()]
    assert call.all[3].payload == b"data: [DONE]\n\n"
    assert call.end == frames.End(("stop",), 3, 1, 2)
    (row,) = rows(sink)
    assert (row.kind, row.outcome, row.payer) == ("replica", "ok", "team")
    counts = (row.uncached_prompt_tokens, row.cached_prompt_tokens, row.output_tokens)
    assert counts == (2, 1, 2)
    assert row.first_token_us == 1_000
    assert row.identity == asgi.identity()


async def test_without_frames_the_bytes_are_plain(sink: usage.MemorySink) -> None:
    _, app = scripted.build(scripted.whole, sink)
    call = await asgi.post(app, asgi.identity(), framed=False)
    assert call.headers["content-type"] == "text/event-stream"
    assert bytes(call.body) == (
        scripted.chunk("a") + scripted.chunk("b", "stop") + b"data: [DONE]\n\n"
    )


async def test_the_row_is_there_before_the_last_bytes(sink: usage.MemorySink) -> None:
    _, app = scripted.build(scripted.whole, sink)
    seen: list[int] = []

    class Watching(asgi.Call):
        async def send(self, message: types.Message) -> None:
            if b"[DONE]" in message.get("body", b""):
                seen.append(len(sink.rows))
            await asgi.Call.send(self, message)

    await asgi.post(app, asgi.identity(), call=Watching())
    assert seen == [1]


def events(*parts: bytes, ends: bool = True) -> scripted.Script:
    async def script(inner: scripted.Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prefilled(3)
        await scripted.begin(send)
        for body in parts:
            tap.emitted(0, [10])
            await scripted.part(send, body)
        if ends:
            await scripted.part(send, b"", more=False)

    return script


DIED = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\n'
OLD = b'data: {"object": "error", "message": "bad input", "code": 400}\n\n'
ABORT = scripted.chunk("", "abort")
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("parts", "code", "message"),
    [
        ((DIED, DONE), "engine_failed", "EngineCore died"),
        ((OLD, DONE), "bad_request", "bad input"),
        ((ABORT, DONE), "replica_lost", "aborted"),
        ((), "replica_lost", "ended before its end"),
        ((b'data: {"choices":[{"te',), "replica_lost", "ended before its end"),
    ],
)
@pytest.mark.parametrize("framed", [True, False])
async def test_a_broken_stream_never_looks_whole(
    sink: usage.MemorySink, parts: tuple[bytes, ...], code: str, message: str, framed: bool
) -> None:
    _, app = scripted.build(events(scripted.chunk("a"), *parts), sink)
    call = await asgi.post(app, asgi.identity(), framed=framed)
    assert b"[DONE]" not in call.body
    assert b'"finish_reason":"' not in call.body
    if framed:
        assert call.client_bytes == scripted.chunk("a"), "only what came whole"
        assert call.error.code == code
        assert message in call.error.message
        assert call.error.output_tokens >= 1
    else:
        assert b'"error"' in call.body
        assert code.encode() in call.body
    (row,) = rows(sink)
    assert row.outcome in {"replica_lost", "error"}
    assert row.payer == "platform"


async def test_an_exception_in_the_engines_app_is_an_error_and_not_a_quiet_end(
    sink: usage.MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        await scripted.begin(send)
        await scripted.part(send, scripted.chunk("a"))
        raise RuntimeError("boom")

    _, app = scripted.build(crash, sink)
    call = await asgi.post(app, asgi.identity())
    assert (call.error.code, "boom" in call.error.message) == ("replica_lost", True)
    assert "engine app failed" in caplog.text
    state = await asgi.run(app, "GET", "/forebay/state", asgi.headers())
    assert state.json["running"] == 0


async def test_a_refusal_passes_as_it_is(sink: usage.MemorySink) -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'

    async def refuse(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        await scripted.begin(send, "application/json", 400)
        await scripted.part(send, body, more=False)

    _, app = scripted.build(refuse, sink)
    call = await asgi.post(app, asgi.identity())
    assert (call.status, bytes(call.body)) == (400, body)
    assert call.headers["content-type"] == "application/json"
    assert [(row.outcome, row.output_tokens) for row in rows(sink)] == [("refused", 0)]


async def test_a_whole_json_answer(sink: usage.MemorySink) -> None:
    body = b'{"choices":[{"index":0,"finish_reason":"length"},{"index":1,"finish_reason":"stop"}]}'

    async def answer(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prompt([1])
        tap.prefilled(1)
        tap.emitted(0, [5])
        tap.emitted(1, [6, 7])
        await scripted.begin(send, "application/json")
        await scripted.part(send, body[:9])
        await scripted.part(send, body[9:], more=False)

    _, app = scripted.build(answer, sink)
    call = await asgi.post(app, asgi.identity(), {"prompt": "x", "n": 2})
    assert call.client_bytes == body
    assert (call.token_ids(0), call.token_ids(1)) == ([5], [6, 7])
    assert call.end == frames.End(("length", "stop"), 1, 0, 3)


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
    (row,) = rows(sink)
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
    lost, won = rows(sink)
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
    assert len(rows(sink)) == 1


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
    assert rows(sink)[-1].outcome == "cancelled"
    assert (await post("/forebay/drain", {})).json["draining"] is True
    assert (await asgi.post(app, asgi.identity("j"))).json["error"]["message"].endswith("draining")


async def test_health_tells_the_engines_failure(sink: usage.MemorySink) -> None:
    inner, app = scripted.build(scripted.whole, sink)
    assert (await asgi.run(app, "GET", "/health", asgi.headers())).status == 200
    inner.failure = "core dumped"
    call = await asgi.run(app, "GET", "/health", asgi.headers())
    assert (call.status, "core dumped" in call.json["error"]["message"]) == (503, True)


async def test_nothing_is_served_that_could_not_be_recorded(sink: usage.MemorySink) -> None:
    inner, app = scripted.build(scripted.whole, sink)
    sink.full = True
    call = await asgi.post(app, asgi.identity())
    assert (call.status, call.json["error"]["code"]) == (503, "recording_unavailable")
    assert not inner.started.is_set()


async def test_other_posts_compute_nothing(sink: usage.MemorySink) -> None:
    inner, app = scripted.build(scripted.whole, sink)
    call = await asgi.run(app, "POST", "/v1/score", asgi.headers(), {})
    assert (call.status, inner.started.is_set()) == (404, False)


@pytest.mark.parametrize("value", ["%7B", "%5B%5D", "%7B%22x%22%3A1%7D", "\xff"])
async def test_a_bad_identity_is_refused(sink: usage.MemorySink, value: str) -> None:
    _, app = scripted.build(scripted.whole, sink)
    given = {**asgi.headers(), "x-forebay-identity": value}
    call = await asgi.run(app, "POST", "/v1/completions", given, {})
    assert (call.status, call.json["error"]["code"]) == (400, "bad_request")


async def test_an_admins_request_is_recorded_at_the_platforms_cost(
    sink: usage.MemorySink,
) -> None:
    _, app = scripted.build(scripted.whole, sink)
    given = asgi.headers(framed=False)
    call = await asgi.run(app, "POST", "/v1/completions", given, {"prompt": "x"})
    assert call.status == 200
    (row,) = rows(sink)
    assert (row.identity.team, row.identity.replica_id) == ("forebay", "r-1")


def test_a_launch_record_survives_its_file_and_refuses_an_open_secret(tmp_path: Any) -> None:
    import json

    from scheduler.contracts import fleet

    secret = tmp_path / "secret"
    secret.write_text("abc\n")
    secret.chmod(0o644)
    spec = fleet.ReplicaSpec("m", "1", fleet.EngineKind.SIMULATED, engine_args={"kv-blocks": 9})
    record = launch.Launch(
        "r-1", "c", "l-1", "l-1.s0", "7", "n1", spec, fleet.Role.SHARED, str(secret)
    )
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(record.to_json()))
    assert launch.Launch.read(path) == record
    with pytest.raises(launch.LaunchError, match="chmod 600"):
        record.secret()
    secret.chmod(0o600)
    assert record.secret() == "abc"
    path.write_text('{"spec": {"engine": "abacus"}}')
    with pytest.raises(launch.LaunchError, match="abacus"):
        launch.Launch.read(path)


def whole_answer(status: int, body: bytes) -> scripted.Script:
    """Return an engine that answers in one piece, once its prompt was computed for a while."""

    async def script(inner: scripted.Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prompt((1, 2, 3))
        tap.prefilled(3, cached=1)
        tap.emitted(0, (10,))
        for _ in range(5):
            await asyncio.sleep(0)
        tap.emitted(0, (11,))
        tap.finished(0, "stop")
        await scripted.begin(send, "application/json", status)
        await scripted.part(send, body, more=False)

    return script


async def test_the_reader_of_a_whole_answer_hears_at_once_that_its_prompt_is_done(
    sink: usage.MemorySink,
) -> None:
    _, app = scripted.build(whole_answer(200, b'{"choices": []}'), sink)
    call = await asgi.post(app, asgi.identity())
    assert [f.kind for f in call.all] == [frames.Kind.PROMPT, frames.Kind.DATA, frames.Kind.END]
    assert (call.all[0].token_ids, call.all[0].chars) == ((1, 2, 3), 1)
    assert (call.all[1].token_ids, call.client_bytes) == ((10, 11), b'{"choices": []}')
    assert call.end == frames.End(("stop",), 3, 1, 2)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "bad_request"), (500, "engine_failed"), (503, "engine_failed")]
)
async def test_an_engine_that_refuses_after_its_first_token_ends_in_an_error_frame(
    sink: usage.MemorySink, status: int, code: str
) -> None:
    body = b'{"error": {"message": "no", "code": %d}}' % status
    _, app = scripted.build(whole_answer(status, body), sink)
    call = await asgi.post(app, asgi.identity())
    assert call.status == 200
    assert (call.error.code, call.error.status, call.error.output_tokens) == (
        code, status if status < 500 else errors.EngineFailed.status, 2,
    )  # fmt: skip
    assert "no" in call.error.message
    (row,) = rows(sink)
    assert row.outcome != "ok"


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
