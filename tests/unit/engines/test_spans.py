"""A replica's span lies between the gateway's and the engine's."""

import asyncio

import pytest
from opentelemetry.sdk.trace import export
from opentelemetry.sdk.trace.export import in_memory_span_exporter
from starlette import types

from engines.replica import spans
from forebay import telemetry
from scheduler.contracts import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Served:
    """An app that notes the header which it is given and answers ``status``, or fails."""

    def __init__(self, status: int = 200, failure: BaseException | None = None) -> None:
        self.seen: list[str] = []
        self._status = status
        self._failure = failure

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        self.seen += [v.decode() for k, v in scope["headers"] if k == b"traceparent"]
        if self._failure is not None:
            raise self._failure
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})


async def call(app: types.ASGIApp, *headers: tuple[bytes, bytes]) -> None:
    async def receive() -> types.Message:
        raise AssertionError("nothing is read")

    async def send(message: types.Message) -> None:
        pass

    await app({"type": "http", "headers": list(headers)}, receive, send)


def traced() -> tuple[tracing.Tracer, in_memory_span_exporter.InMemorySpanExporter]:
    kept = in_memory_span_exporter.InMemorySpanExporter()
    return telemetry.over(export.SimpleSpanProcessor(kept), "replica"), kept


async def test_the_engine_continues_below_the_replicas_span() -> None:
    tracer, kept = traced()
    served = Served()
    app = spans.Spans(served, tracer, {"forebay.replica": "r1"})
    await call(app, (b"traceparent", PARENT.encode()), (b"accept", b"x"))
    (span,) = kept.get_finished_spans()
    assert served.seen == [f"00-{PARENT[3:35]}-{span.context.span_id:016x}-01"]
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT[36:52]
    assert span.attributes is not None
    assert span.attributes["forebay.replica"] == "r1"
    assert span.attributes["http.response.status_code"] == 200
    assert [event.name for event in span.events] == ["first bytes"]


async def test_failures_are_in_the_span() -> None:
    for served, said in (
        (Served(503), "status 503"),
        (Served(failure=ValueError("no")), "ValueError"),
        (Served(failure=asyncio.CancelledError()), "CancelledError"),
    ):
        tracer, kept = traced()
        app = spans.Spans(served, tracer, {})
        if said.startswith("status"):
            await call(app, (b"traceparent", PARENT.encode()))
        else:
            with pytest.raises((ValueError, asyncio.CancelledError)):
                await call(app, (b"traceparent", PARENT.encode()))
        (span,) = kept.get_finished_spans()
        assert span.status.description == said


async def test_requests_outside_a_trace_pass_untouched() -> None:
    tracer, kept = traced()
    served = Served()
    app = spans.Spans(served, tracer, {})
    await call(app)
    await call(app, (b"traceparent", b"nonsense"))
    await call(app, (b"traceparent", PARENT[:-1].encode() + b"0"))  # a caller that did not sample
    assert not kept.get_finished_spans()
    assert served.seen == ["nonsense", PARENT[:-1] + "0"]


def test_the_environment_names_the_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(spans.FACTORY, raising=False)
    assert isinstance(spans.from_environment(), tracing.NoTracer)
    monkeypatch.setenv(spans.FACTORY, telemetry.FACTORY)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    telemetry.tracer.cache_clear()
    assert isinstance(spans.from_environment(), tracing.NoTracer)
    monkeypatch.setenv(spans.FACTORY, "forebay.telemetry:nobody")
    with pytest.raises(ValueError, match=r"FOREBAY_TRACER .*nobody"):
        spans.from_environment()
