"""What every engine must do behind the replica's stack, whichever it is."""

import asyncio
import importlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from scheduler.contracts import frames
from tests.contract import engine_subject

_ENGINES = [
    pytest.param("tests.contract.engine_simulated", id="simulated"),
    pytest.param("tests.contract.engine_http", id="http"),
    pytest.param("tests.contract.engine_vllm_subject", id="vllm", marks=pytest.mark.vllm),
]
HELLO = {"messages": [{"role": "user", "content": "hello there"}]}
SHORT = {"prompt": "hello there", "max_tokens": 12, "ignore_eos": True}
DONE = b"data: [DONE]\n\n"


@pytest_asyncio.fixture(params=_ENGINES)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[engine_subject.Subject]:
    async with importlib.import_module(request.param).subject(request) as found:
        yield found


def events(raw: bytes) -> list[Any]:
    found = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
    assert found[-1] == b"[DONE]"
    return [json.loads(part) for part in found[:-1]]


def text_of(chunks: list[Any]) -> str:
    return "".join(c.get("text", "") for chunk in chunks for c in chunk["choices"])


async def test_stream_and_whole_answer_agree_and_are_recorded(
    subject: engine_subject.Subject,
) -> None:
    whole = await subject.ask({**SHORT, "temperature": 0}, request_id="w")
    stream = await subject.ask({**SHORT, "temperature": 0, "stream": True}, request_id="s")
    assert whole.content_type == stream.content_type == frames.MEDIA_TYPE
    body = json.loads(whole.client_bytes)
    chunks = events(stream.client_bytes)
    assert text_of(chunks) == body["choices"][0]["text"]
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in chunks), "not asked for"
    assert stream.all[-2].payload == DONE
    assert stream.all[-2].kind is frames.Kind.DATA
    for answer in (whole, stream):
        assert answer.end.finish_reasons == ("length",)
        assert answer.end.output_tokens == 12
        assert answer.end.prompt_tokens == body["usage"]["prompt_tokens"]
        if subject.token_ids:
            assert answer.all[0].kind is frames.Kind.PROMPT
            assert len(answer.all[0].token_ids) == answer.end.prompt_tokens
            assert len(answer.ids) == 12
        else:
            assert answer.ids == []
    row = await subject.row("s")
    assert (row.outcome, row.output_tokens) == ("ok", 12)
    assert row.uncached_prompt_tokens + row.cached_prompt_tokens == whole.end.prompt_tokens
    assert 0 < row.first_token_us <= row.ended_us


async def test_a_resumed_answer_goes_on_from_its_ids(subject: engine_subject.Subject) -> None:
    if not subject.token_ids:
        pytest.skip("this engine knows no token ids")
    body = {**HELLO, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    whole = await subject.ask(body, path="/v1/chat/completions")
    ids = whole.ids
    prompt = [*whole.all[0].token_ids, *ids[:5]]
    rest = await subject.ask(
        {"prompt": prompt, "max_tokens": 7, "ignore_eos": True, "temperature": 0}, request_id="q2"
    )
    assert rest.ids == ids[5:]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_names_no_bound_ends_at_the_gateways(
    subject: engine_subject.Subject, stream: bool
) -> None:
    if not subject.token_ids:
        pytest.skip("another server's answers go by its own bound")
    body = {**HELLO, "n": 2, "ignore_eos": True, "stream": stream}
    bound = {"X-Forebay-Most-Tokens": "7"}
    answer = await subject.ask(body, path="/v1/chat/completions", more=bound)
    assert answer.end.finish_reasons == ("length", "length")
    assert answer.end.output_tokens == 14
    longer = await subject.ask(
        body, path="/v1/chat/completions", request_id="q2", more={"X-Forebay-Most-Tokens": "999999"}
    )
    assert (
        longer.end.output_tokens > 14
    )  # the context is the other bound, and no request is refused


async def test_choices_logprobs_and_usage_in_a_stream(subject: engine_subject.Subject) -> None:
    body = {
        **HELLO,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "max_tokens": 6,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    answer = await subject.ask(body, path="/v1/chat/completions")
    chunks = events(answer.client_bytes)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        mine = [c for c in choices if c["index"] == index]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        entries = [e for c in mine if c.get("logprobs") for e in c["logprobs"]["content"]]
        assert len(entries) == 6
    assert answer.end.finish_reasons == ("length", "length")
    assert answer.end.output_tokens == 12


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": [5] * 3000, "max_tokens": 1}, "maximum context length"),
    ],
)
@pytest.mark.parametrize("framed", [True, False])
async def test_what_the_engine_refuses_comes_back_as_it_said_it(
    subject: engine_subject.Subject, body: dict[str, Any], words: str, framed: bool
) -> None:
    answer = await subject.ask(body, framed=framed)
    assert answer.status == 400
    assert answer.content_type.startswith("application/json")
    assert words in answer.json["error"]["message"]
    row = await subject.row("q1")
    assert (row.outcome, row.output_tokens) == ("refused", 0)


async def test_no_path_without_the_secret(subject: engine_subject.Subject) -> None:
    for path in ("/health", "/v1/models", "/forebay/state", "/metrics", "/"):
        status, said = await subject.call("GET", path, secret="wrong")
        assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    assert (await subject.call("GET", "/health"))[0] == 200


async def test_a_spike_takes_batch_seats_in_time_and_the_line_keeps_what_it_had(
    subject: engine_subject.Subject,
) -> None:
    slow = {"prompt": "batch", "stream": True, **subject.slow}
    began = asyncio.Event()
    batch = asyncio.create_task(subject.ask(slow, request_id="b", tier="batch", first=began))
    await began.wait()
    full = await subject.ask(SHORT, request_id="b2", tier="batch")
    assert (full.status, full.json["error"]["code"]) == (429, "replica_full")
    assert full.json["stats"]["batch"] == 1
    one = asyncio.create_task(subject.ask(slow, request_id="i1"))
    await subject.until(lambda said: said["stats"]["interactive"] == 1)
    two = await subject.ask(SHORT, request_id="i2")
    assert two.end.output_tokens == 12
    preempted = await batch
    assert preempted.error.code == "preempted"
    assert DONE not in preempted.client_bytes
    row = await subject.row("b")
    assert (row.outcome, row.payer) == ("preempted", "platform")
    assert row.output_tokens == preempted.error.output_tokens > 0
    said = await subject.until(lambda said: said["stats"]["reclaim_ms"])
    # The budget of 0.3 s is of an engine that has its cores; on a busy machine its steps tell how busy.
    assert said["stats"]["reclaim_ms"][-1] < max(300, 20 * said["stats"]["step_ms"])
    await _leave(one)
    await subject.until(lambda said: said["running"] == 0)


async def _leave(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_seat(
    subject: engine_subject.Subject, stream: bool
) -> None:
    body = {"prompt": "x", "stream": stream, **subject.slow}
    task = asyncio.create_task(subject.ask(body, request_id="gone"))
    before = (await subject.call("GET", "/forebay/state"))[1]["stats"]["output_tokens_total"]
    await subject.until(lambda said: said["stats"]["interactive"] == 1)
    if subject.token_ids:
        await subject.until(lambda said: said["stats"]["output_tokens_total"] > before)
    await _leave(task)
    await subject.until(lambda said: said["running"] == 0)
    row = await subject.row("gone")
    assert row.outcome == "client_gone"
    assert row.output_tokens < 1500
    again = await subject.ask(SHORT, request_id="next")
    assert again.end.output_tokens == 12


async def test_role_abort_and_drain(subject: engine_subject.Subject) -> None:
    slow = {"prompt": "x", "stream": True, **subject.slow}
    began = asyncio.Event()
    batch = asyncio.create_task(subject.ask(slow, request_id="b", tier="batch", first=began))
    await began.wait()
    assert await subject.call("POST", "/forebay/role", {"role": "interactive"}) == (
        200,
        {"role": "interactive", "aborted": 1},
    )
    assert (await batch).error.code == "preempted"
    assert (await subject.ask(SHORT, request_id="b2", tier="batch")).status == 429
    began.clear()
    person = asyncio.create_task(subject.ask(slow, request_id="i", first=began))
    await began.wait()
    _, said = await subject.call("POST", "/forebay/drain", {})
    assert (said["draining"], said["running"]) == (True, 1)
    assert (await subject.ask(SHORT, request_id="j")).status == 429
    asked = {"request_id": "i", "attempt": 1}
    assert (await subject.call("POST", "/forebay/abort", asked))[1] == {"aborted": True}
    assert (await person).error.code == "cancelled"
    assert (await subject.row("i")).outcome == "cancelled"
    await subject.until(lambda said: said["running"] == 0)


async def test_an_engine_that_dies_ends_streams_with_an_error(
    subject: engine_subject.Subject,
) -> None:
    if subject.kill is None:
        pytest.skip("this engine's death is tested elsewhere")
    began = asyncio.Event()
    body = {"prompt": "x", "stream": True, **subject.slow}
    task = asyncio.create_task(subject.ask(body, first=began))
    await began.wait()
    subject.kill()
    answer = await task
    # An external server that reports its death is not yet known to be dead.
    assert answer.error.code in {"replica_lost", "engine_failed"}
    assert DONE not in answer.client_bytes
    assert b'"finish_reason": "' not in answer.client_bytes
    assert (await subject.row("q1")).outcome == "replica_lost"
    after = await subject.ask(SHORT, request_id="q2")
    assert after.status >= 500 or after.error.code in {"replica_lost", "engine_failed"}


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_is_out_of_the_engine_within_two_steps(
    subject: engine_subject.Subject, stream: bool
) -> None:
    """G2, counted by the engine's own steps: alone in it, the sequence is what it steps for."""
    if not subject.token_ids:
        pytest.skip("an external engine tells no steps")
    body = {"prompt": "x", "stream": stream, **subject.slow}
    task = asyncio.create_task(subject.ask(body))
    await subject.until(lambda said: said["stats"]["output_tokens_total"] >= 3)
    task.cancel()
    await asyncio.wait({task})
    await subject.until(lambda said: said["running"] == 0)
    before = -1
    while (said := (await subject.call("GET", "/forebay/state"))[1])["steps_total"] != before:
        before = said["steps_total"]
        await asyncio.sleep(0.2)  # an engine with work makes a step within milliseconds
    # A tiny model's steps take 3 ms, less than the way of an abort; a real model's take longer.
    under_way = math.ceil(subject.abort_s * 1_000 / max(said["stats"]["step_ms"], 1.0))
    assert 0 < said["left_at_step"] <= said["steps_total"]
    assert said["steps_total"] <= said["left_at_step"] + max(2, under_way)
    row = await subject.row("q1")
    assert (row.outcome, row.payer) == ("client_gone", "team")
    assert 3 <= row.output_tokens <= said["steps_total"]


async def test_evicted_streams_end_in_words_to_go_on_by(subject: engine_subject.Subject) -> None:
    """S6: the time to drain is up; what was sampled is told, and nothing new is taken."""
    began = asyncio.Event()
    body = {"prompt": "x", "stream": True, **subject.slow}
    task = asyncio.create_task(subject.ask(body, first=began))
    await began.wait()
    status, said = await subject.call("POST", "/forebay/evict", {})
    answer = await task
    assert (status, said["evicted"]) == (200, 1)
    assert answer.error.code == "draining"
    assert DONE not in answer.client_bytes
    if subject.token_ids:
        data = [frame for frame in answer.all if frame.kind is frames.Kind.DATA]
        assert len(answer.ids) + len(data[-1].ahead) // 4 > 0
    late = await subject.ask(SHORT, request_id="q2")
    assert late.status == 429


async def test_plain_answers_for_an_admin(subject: engine_subject.Subject) -> None:
    answer = await subject.ask({**SHORT, "stream": True}, framed=False)
    assert answer.content_type.startswith("text/event-stream")
    assert len(text_of(events(answer.body))) > 0
