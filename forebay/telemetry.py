"""OpenTelemetry behind the tracing port: in the gateway, and in each replica's own environment.

Configured by OpenTelemetry's own variables, which leases inherit: nothing is traced without
``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``…_TRACES_ENDPOINT``); ``OTEL_TRACES_SAMPLER`` and ``…_ARG`` choose
which requests (here 1 % by default, and those that a caller has sampled).
"""

import functools
import logging
import os
import threading
import typing
from collections.abc import Callable

from scheduler.contracts import tracing

if typing.TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.sdk import trace as sdk

FACTORY = "forebay.telemetry:tracer"
PREFIX = "OTEL_"
_SHARE = 0.01
_log = logging.getLogger(__name__)


def wanted() -> bool:
    """Return whether the environment names a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(os.environ.get(name) for name in names)


@functools.cache
def tracer(service: str) -> tracing.Tracer:
    """Return this process's tracer; spans are sent in the background, and dropped if nobody takes them.

    Args:
        service: ``service.name`` unless the environment gives one.
    """
    if not wanted():
        return tracing.NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.trace import export
    except ImportError as error:  # an engine's environment may be without them
        _log.warning(
            "no traces from here: %s; install opentelemetry-exporter-otlp-proto-http", error
        )
        return tracing.NoTracer()
    return over(export.BatchSpanProcessor(trace_exporter.OTLPSpanExporter()), service)


def over(processor: "sdk.SpanProcessor", service: str) -> "Tracer":
    """Return a tracer that hands its spans to ``processor``."""
    from opentelemetry.sdk import resources
    from opentelemetry.sdk import trace as sdk
    from opentelemetry.sdk.trace import sampling

    sampler = None  # the SDK then reads the environment itself
    if "OTEL_TRACES_SAMPLER" not in os.environ:
        sampler = sampling.ParentBasedTraceIdRatio(_SHARE)
    named = resources.Resource.create(
        {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
    )
    provider = sdk.TracerProvider(sampler=sampler, resource=named)
    provider.add_span_processor(processor)
    return Tracer(provider.get_tracer("forebay"), provider.force_flush)


class Tracer:
    """Begins spans with OpenTelemetry.

    Args:
        inner: makes them.
        send: sends those that have ended, however long that takes.
    """

    def __init__(self, inner: "otel.Tracer", send: Callable[[], object]) -> None:
        self._inner = inner
        self._send = send

    def flush(self, seconds: float) -> None:
        """Send what has ended, for so long at most.

        In a thread of its own: the exporter tries a collector that is away again and again.
        """
        sending = threading.Thread(target=self._send, name="spans", daemon=True)
        sending.start()
        sending.join(seconds)

    def begin(
        self, name: str, traceparent: str | None, attributes: tracing.Attributes | None = None
    ) -> tracing.Span | None:
        """Begin a span; None if the sampler does not want this trace."""
        from opentelemetry import trace as otel

        made = self._inner.start_span(
            name, _context(traceparent), otel.SpanKind.SERVER, dict(attributes or {})
        )
        return Span(self._inner, made) if made.is_recording() else None


class Span:
    """One OpenTelemetry span."""

    def __init__(self, inner: "otel.Tracer", span: "otel.Span") -> None:
        self._inner = inner
        self._span = span

    @property
    def traceparent(self) -> str:
        """The W3C header of this span."""
        here = self._span.get_span_context()
        return f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"

    def child(self, name: str, attributes: tracing.Attributes | None = None) -> "Span":
        """Begin a part of this span."""
        from opentelemetry import trace as otel

        within = otel.set_span_in_context(self._span)
        made = self._inner.start_span(name, within, otel.SpanKind.INTERNAL, dict(attributes or {}))
        return Span(self._inner, made)

    def event(self, name: str) -> None:
        """Add an event."""
        self._span.add_event(name)

    def end(self, error: str = "", attributes: tracing.Attributes | None = None) -> None:
        """End the span."""
        from opentelemetry import trace as otel

        if attributes:
            self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(otel.StatusCode.ERROR, error)
        if self._span.is_recording():
            self._span.end()


def _context(traceparent: str | None) -> typing.Any:
    from opentelemetry.trace.propagation import tracecontext

    carrier = {"traceparent": traceparent} if traceparent else {}
    return tracecontext.TraceContextTextMapPropagator().extract(carrier)
