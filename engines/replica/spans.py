"""One span for each sampled request of a replica, between the gateway's attempt and the engine's own.

The engine sees the span's ``traceparent`` in place of the gateway's, so that an engine which traces
itself (vLLM's ``otlp-traces-endpoint``) goes on below it.
"""

import importlib
import os

from starlette import types

from scheduler.contracts import tracing

FACTORY = (
    "FOREBAY_TRACER"  # environment: import path ``module:function``; called with the service's name
)
_HEADER = b"traceparent"


def from_environment() -> tracing.Tracer:
    """Return the tracer that the environment names, or one that traces nothing.

    Raises:
        ValueError: there is no such function.
    """
    path = os.environ.get(FACTORY, "")
    if not path:
        return tracing.NoTracer()
    module, _, function = path.partition(":")
    try:
        made: tracing.Tracer = getattr(importlib.import_module(module), function)("forebay-replica")
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{FACTORY} {path!r}: {error}") from error
    return made


class Spans:
    """ASGI middleware."""

    def __init__(self, app: types.ASGIApp, tracer: tracing.Tracer, attributes: tracing.Attributes):
        self._app = app
        self._tracer = tracer
        self._attributes = attributes

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Serve; requests outside a trace pass untouched."""
        parent = _parent(scope) if scope["type"] == "http" else None
        if parent is None:
            await self._app(scope, receive, send)
            return
        span = self._tracer.begin("replica", parent, self._attributes)
        if span is None:
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != _HEADER]
        inner = {**scope, "headers": [*headers, (_HEADER, span.traceparent.encode())]}
        status = 0
        begun = False

        async def watched(message: types.Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status = int(message["status"])
            elif not begun:
                begun = True
                span.event("first bytes")
            await send(message)

        error = ""
        try:
            await self._app(inner, receive, watched)
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            if not error and (status == 0 or status >= 500):
                error = f"status {status}" if status else "the client left"
            span.end(error, {"http.response.status_code": status})


def _parent(scope: types.Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _HEADER:
            return tracing.parent(value.decode("latin-1"))
    return None
