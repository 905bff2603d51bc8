"""What is told of a request beside its answer: spans, the log, numbers for Prometheus."""

import logging
import re

import httpx
import pytest
from opentelemetry.sdk.trace import export
from opentelemetry.sdk.trace.export import in_memory_span_exporter

from forebay import telemetry
from scheduler.contracts import clock
from tests.unit.gateway import harness

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def session(served: harness.Served, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=served.http,
        headers={**harness.ANN_AUTH, **headers},
        trust_env=False,
        verify=False,
    )


async def test_a_callers_trace_reaches_the_replica_untouched_where_nothing_is_traced() -> None:
    async with (
        harness.one_replica(harness.hello) as (served, fake),
        session(served, traceparent=PARENT) as http,
    ):
        await http.post(CHAT, json=harness.chat_body(stream=True))
        await http.post(CHAT, json=harness.chat_body(), headers={"traceparent": "nonsense"})
    assert [r.headers.get("traceparent") for r in fake.received] == [PARENT, None]


async def test_request_attempt_and_replica_are_one_trace() -> None:
    kept = in_memory_span_exporter.InMemorySpanExporter()
    tracer = telemetry.over(export.SimpleSpanProcessor(kept), "gateway")
    async with (
        harness.one_replica(harness.hello, tracer=tracer) as (served, fake),
        session(served, traceparent=PARENT) as http,
    ):
        answer = await http.post(CHAT, json=harness.chat_body(stream=True))
        fake.script = _refuse
        await http.post(CHAT, json=harness.chat_body())
    spans = {span.name: span for span in reversed(kept.get_finished_spans())}
    last = kept.get_finished_spans()[-1]
    assert (last.name, last.status.description) == ("request", "bad_request")
    request, attempt = spans["request"], spans["attempt"]
    assert fake.received[0].headers["traceparent"] == (
        f"00-{PARENT[3:35]}-{attempt.context.span_id:016x}-01"
    )
    assert attempt.parent is not None
    assert attempt.parent.span_id == request.context.span_id
    assert request.attributes is not None
    assert request.attributes["forebay.request_id"] == answer.headers["x-forebay-request-id"]
    assert request.attributes["forebay.result"] == "ok"


@pytest.mark.parametrize(("wanted", "lines"), [("all", 2), ("errors", 1), ("off", 0)])
async def test_the_log_has_ids_and_no_text(
    wanted: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.access_log")
    async with (
        harness.one_replica(harness.hello, access_log=wanted) as (served, fake),
        session(served) as http,
    ):
        answer = await http.post(CHAT, json=harness.chat_body())
        fake.script = _refuse
        await http.post(CHAT, json=harness.chat_body())
    ended = [record for record in caplog.records if hasattr(record, "forebay.result")]
    assert len(ended) == lines
    if wanted == "all":
        first = vars(ended[0])
        assert first["forebay.request_id"] == answer.headers["x-forebay-request-id"]
        assert (first["forebay.team"], first["forebay.result"]) == ("physics", "ok")
        assert "Hello" not in str(first)
    if lines:
        assert vars(ended[-1])["forebay.result"] == "bad_request"


async def _refuse(received: harness.Received, out: harness.Out) -> None:
    await out.json(400, {"error": {"message": "no", "code": 400}})


async def test_tokens_hits_and_waste_are_counted() -> None:
    async with harness.one_replica(harness.hello) as (served, _), session(served) as http:
        await http.post(CHAT, json=harness.chat_body(stream=True))
        text = (await http.get("/metrics")).text
    (row,) = [row for row in served.closed() if row.kind == "close"]
    labels = '{model="chat",tier="interactive"}'
    prompt = row.uncached_prompt_tokens + row.cached_prompt_tokens
    assert f"forebay_prompt_tokens_total{labels} {float(prompt)}" in text
    assert (
        f"forebay_prefix_cache_hit_tokens_total{labels} {float(row.cached_prompt_tokens)}" in text
    )
    assert f"forebay_output_tokens_total{labels} {float(row.output_tokens)}" in text


async def test_a_clock_that_is_set_forward_makes_no_first_token_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time to first tokens decides how many replicas are started."""
    step_us, really = 0, clock.SystemClock.wall_us

    async def answers(received: harness.Received, out: harness.Out) -> None:
        nonlocal step_us
        step_us = 3_600_000_000
        await harness.hello(received, out)

    monkeypatch.setattr(clock.SystemClock, "wall_us", lambda self: really(self) + step_us)
    async with harness.one_replica(answers) as (served, _), session(served) as http:
        await http.post(CHAT, json=harness.chat_body(stream=True))
        text = (await http.get("/metrics")).text
    (total,) = re.findall(r'time_to_first_token_seconds_sum\{.*tier="interactive"\} (\S+)', text)
    assert float(total) < 60
