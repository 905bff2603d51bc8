"""The one table from errors to what callers see, over HTTP and over gRPC.

Statuses and codes stand in `scheduler.contracts.errors`; here is only how they are put on the wire.
"""

import json
import logging
import math

import grpc
from fastapi import exceptions as fastapi_exceptions
from starlette import exceptions as starlette_exceptions
from starlette import responses

from scheduler.contracts import errors

_DISK_RETRY_S = 10.0  # somebody has to make room first
_log = logging.getLogger(__name__)


def known(error: BaseException) -> errors.ForebayError:
    """Return ``error`` as one that a caller may see; a surprise is logged and becomes `Internal`."""
    if isinstance(error, errors.ForebayError):
        return error
    _log.error("unexpected error on the request path", exc_info=error)
    return errors.Internal("internal error: send the request again, and report it if it stays")


def body(error: errors.ForebayError) -> bytes:
    """Return the OpenAI error body."""
    return json.dumps(error.openai()).encode()


def headers(error: errors.ForebayError) -> dict[str, str]:
    """Return the HTTP headers that an error brings along."""
    seconds = error.retry_after_s
    if seconds is None and isinstance(error, errors.RecordingUnavailable):
        seconds = _DISK_RETRY_S
    told = dict(error.limits)
    if seconds is not None:
        told["retry-after"] = str(max(1, math.ceil(seconds)))
    return told


def named(request_id: str) -> dict[str, str]:
    """Return the headers that name a request: ours, and the one that OpenAI's clients read."""
    return {"x-forebay-request-id": request_id, "x-request-id": request_id}


def response(error: errors.ForebayError, request_id: str | None = None) -> responses.Response:
    """Return the HTTP response for ``error``."""
    extra = named(request_id) if request_id else {}
    return responses.Response(
        body(error), error.status, {**headers(error), **extra}, "application/json"
    )


def grpc_status(error: errors.ForebayError) -> grpc.StatusCode:
    """Return the gRPC status code for ``error``."""
    return grpc.StatusCode[error.grpc_status]


def grpc_trailers(error: errors.ForebayError) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata: our code, and when to come back."""
    code = (("x-forebay-code", error.code),)
    return code + tuple(headers(error).items())


def from_framework(error: Exception) -> errors.ForebayError:
    """Turn the web framework's own complaints into ours; of many faults the first is named."""
    if isinstance(error, fastapi_exceptions.RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part)[:64] for part in first["loc"][:8])
        return errors.BadRequest(f"{where}: {str(first['msg'])[:200]}", param=where)
    if isinstance(error, starlette_exceptions.HTTPException):
        made = _Http(str(error.detail)[:500])
        made.status = error.status_code
        if error.status_code >= 500:
            made.kind = "server_error"
        made.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, made.code)
        return made
    return known(error)


class _Http(errors.BadRequest):
    """An error that only HTTP knows, such as a wrong method."""
