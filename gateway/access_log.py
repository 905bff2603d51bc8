"""The line that a request leaves in the log, where the site wants one: ids and how it ended, never text."""

import logging

from gateway import metrics
from scheduler.contracts import clock, errors, requests

_log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines of one gateway worker.

    Args:
        wanted: all, errors or off.
        time: the worker's clock.
    """

    def __init__(self, wanted: str, time: clock.Clock) -> None:
        self._all = wanted == "all"
        self._errors = wanted in ("all", "errors")
        self._clock = time

    def ended(self, request: requests.InferenceRequest, result: str) -> None:
        """Write how a request ended."""
        if self._all or (self._errors and result != metrics.OK):
            took_ms = max(0, self._clock.wall_us() - request.arrived_us) // 1_000
            extra = {**traits(request), "forebay.result": result, "forebay.ms": took_ms}
            _log.info("%s: %s after %d ms", request.request_id, result, took_ms, extra=extra)

    def turned_away(self, error: errors.ForebayError, request_id: str, endpoint: str) -> None:
        """Write of a request that was refused before it was known who asks for what."""
        if self._errors:
            extra = {
                "forebay.request_id": request_id,
                "forebay.endpoint": endpoint,
                "forebay.result": error.code,
            }
            _log.info("%s: %s: %s", request_id, error.code, error.message, extra=extra)


def traits(request: requests.InferenceRequest) -> dict[str, str]:
    """Return what traces and logs say of a request; never a word of its prompt or answer."""
    return {
        "forebay.request_id": request.request_id,
        "forebay.model": request.model,
        "forebay.tier": request.tier.value,
        "forebay.team": request.caller.team,
        "forebay.endpoint": request.endpoint.value,
        "forebay.caller_request_id": request.caller_request_id or "",
    }
