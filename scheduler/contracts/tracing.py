"""Spans of a request from the gateway to the replica, as ports: who makes them is wired by `forebay/`.

A trace is named by W3C's ``traceparent`` header, from the caller if it sends one. Most requests are not
sampled, and then nothing here may cost anything: `Tracer.begin` returns None.
"""

import re
from collections.abc import Mapping
from typing import Protocol

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Attributes = Mapping[str, str | int | float | bool]


def parent(header: str | None) -> str | None:
    """Return a caller's ``traceparent`` if it is one, else None: a wrong one starts a new trace."""
    return header if header is not None and TRACEPARENT.fullmatch(header) else None


class Span(Protocol):
    """One timed part of a trace; `end` closes it, and only the first call counts."""

    @property
    def traceparent(self) -> str:
        """The header that makes what follows elsewhere a child of this span."""
        ...

    def child(self, name: str, attributes: Attributes | None = None) -> "Span":
        """Begin a part of this span."""
        ...

    def event(self, name: str) -> None:
        """Note that something happens now (the first token)."""
        ...

    def end(self, error: str = "", attributes: Attributes | None = None) -> None:
        """End it; ``error`` is one line on why it failed."""
        ...


class Tracer(Protocol):
    """Begins spans."""

    def begin(
        self, name: str, traceparent: str | None, attributes: Attributes | None = None
    ) -> Span | None:
        """Begin the first span of this process in a trace; None if the trace is not sampled."""
        ...

    def flush(self, seconds: float) -> None:
        """Send what has ended, for so long at most: this process ends without ceremony. Blocks."""
        ...


class NoTracer:
    """Traces nothing."""

    def begin(
        self, name: str, traceparent: str | None, attributes: Attributes | None = None
    ) -> Span | None:
        """Return None."""
        return None

    def flush(self, seconds: float) -> None:
        """Do nothing."""
