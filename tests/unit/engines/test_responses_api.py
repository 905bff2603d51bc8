"""`/v1/responses` through a replica's stack: its own end, its own errors, and cached tokens for everybody."""

import asyncio
import json
from typing import Any

import pytest
from starlette import types

from engines.http import upstream
from engines.replica import engine, responses_api, sse, strict, used
from engines.vllm import calls
from scheduler.contracts import frames, resume, usage
from tests.unit.engines import asgi, scripted

PATH = "/v1/responses"
USAGE = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}


def event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def whole(status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "usage": USAGE, **more}


CREATED = event("response.created", response=whole("in_progress", usage=None))
PROGRESS = event("response.in_progress", response=whole("in_progress", usage=None))
LAST = event("response.completed", response=whole())
CUT_SHORT = event(
    "response.incomplete",
    response=whole("incomplete", incomplete_details={"reason": "max_output_tokens"}),
)


def delta(text: str) -> bytes:
    return event("response.output_text.delta", delta=text)


def stream(*after: bytes, reason: str = "stop", ends: bool = True) -> scripted.Script:
    """Open, say `a` and `b`, then ``after``."""

    async def script(inner: scripted.Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
        await scripted.begin(send)
        await scripted.part(send, CREATED)
        await scripted.part(send, PROGRESS)
        tap.prompt([1, 2, 3])
        tap.prefilled(3, cached=1)
        for number, text in enumerate("ab"):
            tap.emitted(0, [10 + number])
            await scripted.part(send, delta(text))
        tap.finished(0, reason)
        for body in after:
            await scripted.part(send, body)
        if ends:
            await scripted.part(send, b"", more=False)

    return script


async def ask(script: scripted.Script, sink: usage.MemorySink, **body: Any) -> asgi.Call:
    _, app = scripted.build(script, sink)
    return await asgi.run(app, "POST", PATH, asgi.headers(asgi.identity()), {"input": "x", **body})


@pytest.mark.parametrize(
    ("last", "reason"),
    [(LAST, "stop"), (CUT_SHORT, "length"), (LAST.replace(b"\n", b"\r\n"), "stop")],
)
@pytest.mark.parametrize("done", [b"", b"data: [DONE]\n\n"])
async def test_the_finished_response_is_the_last_frame_of_its_own(
    sink: usage.MemorySink, last: bytes, reason: str, done: bytes
) -> None:
    call = await ask(stream(last, done), sink)

    kinds = [frame.kind for frame in call.all]
    assert kinds == [frames.Kind.PROMPT, *[frames.Kind.DATA] * 3, frames.Kind.END]
    assert call.all[0].payload == b"it is no chat and no completion"
    assert call.all[1].payload == CREATED + PROGRESS + delta("a"), "the opening waits for a token"
    assert [frame.token_ids for frame in call.all[1:4]] == [(10,), (11,), ()]
    assert call.all[3].payload.startswith(b"event: response.")
    final = json.loads(call.all[3].payload.partition(b"data: ")[2])["response"]
    assert final["usage"]["input_tokens_details"] == {"cached_tokens": 1}
    assert call.end == frames.End((reason,), 3, 1, 2)
    assert b"[DONE]" not in call.client_bytes
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.outcome, row.output_tokens) == ("ok", 2)


FAILED = event("response.failed", response=whole("failed", error={"message": "core died"}))
ERROR = event("error", message="core died", code="server_error")
BARE = b'data: {"error":{"message":"core died","code":500}}\n\n'


@pytest.mark.parametrize(
    ("after", "reason", "code", "words"),
    [
        ((FAILED,), "stop", "engine_failed", "core died"),
        ((ERROR,), "stop", "engine_failed", "core died"),
        ((BARE, LAST), "stop", "engine_failed", "core died"),
        ((), "stop", "replica_lost", "ended before its end"),
        ((b"data: [DONE]\n\n",), "stop", "replica_lost", "ended before its end"),
        ((LAST,), "abort", "replica_lost", "aborted the sequence"),
    ],
)
async def test_a_broken_one_never_looks_whole(
    sink: usage.MemorySink, after: tuple[bytes, ...], reason: str, code: str, words: str
) -> None:
    call = await ask(stream(*after, reason=reason), sink)

    assert call.client_bytes == CREATED + PROGRESS + delta("a") + delta("b")
    assert call.error.code == code
    assert words in call.error.message
    assert call.error.output_tokens == 2
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert row.payer == "platform"


async def test_one_that_is_lost_before_its_first_token_has_said_nothing(
    sink: usage.MemorySink,
) -> None:
    async def script(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        await scripted.begin(send)
        await scripted.part(send, CREATED)
        tap.failed("core died")
        await scripted.part(send, b"", more=False)

    call = await ask(script, sink)

    assert call.client_bytes == b"", "so another replica may begin anew"
    assert call.error.code == "replica_lost"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (whole(), ""),
        (whole("incomplete"), ""),
        (whole("failed", error={"message": "core died"}), "engine_failed"),
        (whole("cancelled"), "replica_lost"),
        ({"object": "nonsense"}, "engine_failed"),
    ],
)
async def test_a_whole_answer_is_judged_by_its_status(
    sink: usage.MemorySink, answer: dict[str, Any], code: str
) -> None:
    async def script(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prefilled(3)
        tap.emitted(0, [10, 11])
        await scripted.begin(send, "application/json")
        await scripted.part(send, json.dumps(answer).encode(), more=False)

    call = await ask(script, sink)

    if code:
        assert call.error.code == code
        return
    assert call.end.output_tokens == 2
    details = json.loads(call.client_bytes)["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": 0}


def test_text_that_looks_like_an_event_is_text() -> None:
    said = delta('{"type": "response.completed"} "error": {} [DONE]')

    assert responses_api.read(said) == sse.PLAIN
    assert responses_api.read(event("response.mcp_call.failed", error="x")) == sse.PLAIN


def test_impossible_log_probabilities_are_null_in_a_named_event_too() -> None:
    named = event("response.output_text.delta", logprobs=[{"logprob": -9999.0}])

    head, _, payload = strict.event(named).partition(b"data: ")
    assert head == b"event: response.output_text.delta\n"
    assert json.loads(payload)["logprobs"] == [{"logprob": None}]


COUNTED: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (None, 7),
        ({}, 7),
        ({"audio_tokens": 1}, 7),
        ({"cached_tokens": None}, 7),
        ({"cached_tokens": 0}, 0),
    ],
)
def test_cached_tokens_are_filled_in_where_an_engine_is_silent(details: Any, told: int) -> None:
    chunk = {"choices": [], "usage": {**COUNTED, "prompt_tokens_details": details}}
    value = json.loads(used.event(f"data: {json.dumps(chunk)}\n\n".encode(), 7)[6:])

    assert value["usage"]["prompt_tokens_details"]["cached_tokens"] == told


@pytest.mark.parametrize("value", [[], {}, {"usage": None}, {"usage": {"prompt_tokens": 3}}])
def test_an_answer_that_counts_no_output_is_left_alone(value: Any) -> None:
    assert not used.fill(value, 7)


async def test_a_chat_streams_usage_tells_cached_tokens(sink: usage.MemorySink) -> None:
    async def script(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prefilled(3, cached=2)
        await scripted.begin(send)
        tap.emitted(0, [10])
        tap.finished(0, "stop")
        await scripted.part(send, scripted.chunk("a", "stop"))
        counts = f"data: {json.dumps({'choices': [], 'usage': COUNTED})}\n\n"
        await scripted.part(send, counts.encode())
        await scripted.part(send, b"data: [DONE]\n\n", more=False)

    _, app = scripted.build(script, sink)
    call = await asgi.post(app, asgi.identity())
    (line,) = [line for line in call.client_bytes.splitlines() if b'"usage"' in line]
    assert json.loads(line[6:])["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_an_external_server_is_not_asked_for_usage_and_is_understood() -> None:
    body = json.dumps({"model": "x", "input": "a", "stream": True}).encode()
    assert upstream.prepare(body, "", PATH) == upstream.Forwarded(body)

    tap = engine.Tap(lambda: 1)
    watch = upstream.Watch(tap, strip_usage=False)
    assert watch.events(CREATED + delta("a")) == CREATED + delta("a")
    assert tap.output_tokens == 1
    details = {"input_tokens_details": {"cached_tokens": 2}}
    last = event("response.completed", response=whole(usage={**USAGE, **details}))
    assert watch.events(last) == last
    assert (tap.prompt_tokens, tap.cached_tokens, tap.output_tokens) == (3, 2, 2)


def test_vllms_id_of_a_response_leads_back_to_ours() -> None:
    taps = engine.Taps(lambda: 1)
    taps.open("r1")
    running = calls.Calls(taps)

    assert running.owner("resp_r1_0") == running.owner("resp_r1_3") == ("r1", 0)
    assert running.owner("resp_r2_0") is None


async def test_the_clients_id_of_a_response_is_ours() -> None:
    seen: list[bytes] = []

    async def vllm(scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        seen.append((await receive())["body"])

    async def nothing(message: types.Message) -> None:
        await asyncio.sleep(0)

    for path, body in ((PATH, b'{"input":"a"}'), (PATH, b"no JSON"), ("/v1/completions", b"{}")):

        async def receive(body: bytes = body) -> types.Message:
            return {"type": "http.request", "body": body}

        wrapped = calls.Releasing(vllm, calls.Calls(engine.Taps(lambda: 1)))
        scope = {"type": "http", "path": path, "headers": [(b"x-request-id", b"r1")]}
        await wrapped(scope, receive, nothing)

    assert json.loads(seen[0]) == {"input": "a", "request_id": "resp_r1"}
    assert seen[1:] == [b"no JSON", b"{}"]


def test_it_is_not_resumed() -> None:
    assert resume.why_not({"input": "a", "temperature": 0}) == "it is no chat and no completion"
