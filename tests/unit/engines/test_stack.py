"""The stack before an engine's app: secret, frames, errors, rows."""

import asyncio
from typing import Any

import pytest
from starlette import types

from engines.replica import engine, launch
from scheduler.contracts import errors, frames, usage
from tests.unit.engines import asgi, scripted


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
    (row,) = asgi.rows(sink)
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
    (row,) = asgi.rows(sink)
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
    assert (call.error.code, "boom" in call.error.message) == ("engine_failed", True)
    assert "engine app failed" in caplog.text
    state = await asgi.run(app, "GET", "/forebay/state", asgi.headers())
    assert state.json["running"] == 0


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize("after", [(DIED, DONE), (OLD, DONE), ()])
async def test_what_fails_before_its_first_token_has_said_nothing(
    sink: usage.MemorySink, after: tuple[bytes, ...]
) -> None:
    """Not even who speaks: another replica may begin anew, and a refusal keeps its status."""

    async def script(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prompt([1, 2, 3])
        await scripted.begin(send)
        await scripted.part(send, b"".join([ROLE, *after]), more=False)

    _, app = scripted.build(script, sink)
    call = await asgi.post(app, asgi.identity())
    assert call.client_bytes == b""
    assert call.error.output_tokens == 0


@pytest.mark.parametrize(("sampled", "code"), [(0, "bad_request"), (1, "engine_failed")])
async def test_a_request_that_is_refused_when_its_answer_has_begun_is_no_loss(
    sink: usage.MemorySink, caplog: pytest.LogCaptureFixture, sampled: int, code: str
) -> None:
    """Nor is the replica suspected, which other teams' requests need."""

    async def script(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prompt([1, 2, 3])
        await scripted.begin(send)
        await scripted.part(send, ROLE)
        tap.sampled(sampled)
        raise engine.Refused("token_id(s) [-1] in stop_token_ids")

    _, app = scripted.build(script, sink)
    call = await asgi.post(app, asgi.identity())
    assert (call.error.code, call.client_bytes) == (code, b"")
    assert "stop_token_ids" in call.error.message
    assert "Traceback" not in caplog.text
    (row,) = asgi.rows(sink)
    assert row.output_tokens == sampled


async def test_a_refusal_passes_as_it_is(sink: usage.MemorySink) -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'

    async def refuse(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        await scripted.begin(send, "application/json", 400)
        await scripted.part(send, body, more=False)

    _, app = scripted.build(refuse, sink)
    call = await asgi.post(app, asgi.identity())
    assert (call.status, bytes(call.body)) == (400, body)
    assert call.headers["content-type"] == "application/json"
    assert [(row.outcome, row.output_tokens) for row in asgi.rows(sink)] == [("refused", 0)]


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
    (row,) = asgi.rows(sink)
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
    (row,) = asgi.rows(sink)
    assert row.outcome != "ok"
