"""Spans from the gateway's port to OpenTelemetry's exporter."""

import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import export
from opentelemetry.sdk.trace.export import in_memory_span_exporter

from forebay import telemetry
from scheduler.contracts import tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
def spans() -> in_memory_span_exporter.InMemorySpanExporter:
    return in_memory_span_exporter.InMemorySpanExporter()


def test_a_callers_trace_goes_on_through_both_sides(
    spans: in_memory_span_exporter.InMemorySpanExporter,
) -> None:
    gateway = telemetry.over(export.SimpleSpanProcessor(spans), "gateway")
    replica = telemetry.over(export.SimpleSpanProcessor(spans), "replica")
    request = gateway.begin("request", CALLER, {"forebay.model": "chat"})
    assert request is not None
    attempt = request.child("attempt", {"forebay.attempt": 1})
    there = replica.begin("replica", attempt.traceparent)
    assert there is not None
    there.event("first_token")
    there.end()
    attempt.end("replica_lost")
    request.end(attributes={"forebay.result": "ok"})
    request.end("only the first end counts")
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"request", "attempt", "replica"}
    assert {f"{s.context.trace_id:032x}" for s in found.values()} == {CALLER.split("-")[1]}
    parents = {name: s.parent.span_id if s.parent else 0 for name, s in found.items()}
    assert f"{parents['request']:016x}" == CALLER.split("-")[2]
    assert parents["attempt"] == found["request"].context.span_id
    assert parents["replica"] == found["attempt"].context.span_id
    assert [event.name for event in found["replica"].events] == ["first_token"]
    assert found["attempt"].status.description == "replica_lost"
    assert found["request"].status.is_ok or found["request"].status.is_unset
    assert found["replica"].resource.attributes["service.name"] == "replica"


def test_an_unsampled_trace_costs_nothing(
    spans: in_memory_span_exporter.InMemorySpanExporter,
) -> None:
    made = telemetry.over(export.SimpleSpanProcessor(spans), "gateway")
    assert made.begin("request", UNSAMPLED) is None
    assert not spans.get_finished_spans()


def test_a_process_that_just_ends_has_sent_what_it_had_and_waits_for_no_collector() -> None:
    """Spans of a replica's last seconds were lost: exit handlers do not run there."""
    kept = in_memory_span_exporter.InMemorySpanExporter()
    made = telemetry.over(export.BatchSpanProcessor(kept, schedule_delay_millis=60_000), "replica")
    span = made.begin("replica", CALLER)
    assert span is not None
    span.end()
    assert not kept.get_finished_spans()
    made.flush(5.0)
    assert [each.name for each in kept.get_finished_spans()] == ["replica"]
    away = threading.Event()
    with_none = telemetry.Tracer(trace.get_tracer("none"), away.wait)
    with_none.flush(0.01)  # returns, though nobody answers
    away.set()


def test_nothing_is_traced_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    telemetry.tracer.cache_clear()
    assert isinstance(telemetry.tracer("gateway"), tracing.NoTracer)
    telemetry.tracer.cache_clear()


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (CALLER, True),
        (None, False),
        ("", False),
        (CALLER.upper(), False),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", False),
        (CALLER + "x", False),
    ],
)
def test_only_a_traceparent_is_believed(header: str | None, kept: bool) -> None:
    assert tracing.parent(header) == (header if kept else None)
