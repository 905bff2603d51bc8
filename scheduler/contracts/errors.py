"""What can go wrong on the request path, and how each is told over HTTP, gRPC and to the batch runner.

```
ForebayError
├── BadRequest            bad_request            400  INVALID_ARGUMENT     never retry as it is
│   ├── ContextTooLong    context_length_exceeded 400 INVALID_ARGUMENT
│   ├── BodyTooLarge      body_too_large         413  RESOURCE_EXHAUSTED
│   ├── BodyLate          body_late              408  DEADLINE_EXCEEDED    once, on another connection
│   └── LargerThanQuota   request_larger_than_quota 400 INVALID_ARGUMENT
├── Unauthenticated       invalid_api_key        401  UNAUTHENTICATED      after a new credential
│   └── KeyExpired        api_key_expired        401  UNAUTHENTICATED
├── Forbidden             forbidden              403  PERMISSION_DENIED    never
├── NotFound              not_found              404  NOT_FOUND            never
│   └── ModelNotFound     model_not_found        404  NOT_FOUND
├── Shed                  overloaded             429  RESOURCE_EXHAUSTED   after Retry-After
├── QuotaExceeded         quota_exceeded         429  RESOURCE_EXHAUSTED   after Retry-After, if one is told
├── Expired               deadline_exceeded      504  DEADLINE_EXCEEDED    with a later deadline
├── NoReplica             no_replica             503  UNAVAILABLE          after Retry-After
├── ReplicaLost           replica_lost           502  UNAVAILABLE          at once, if nothing was sent
│   ├── Draining          draining               502  UNAVAILABLE          the same: the replica had to leave
│   └── EngineFailed      engine_failed          502  UNAVAILABLE          the same: its replica lives on
├── Busy                  busy                   503  RESOURCE_EXHAUSTED   after Retry-After
├── Preempted             preempted              503  ABORTED              at once (tier batch only)
├── RecordingUnavailable  recording_unavailable  503  UNAVAILABLE          after Retry-After (spool disk full)
├── Cancelled             cancelled              499  CANCELLED            never
└── Internal              internal               500  INTERNAL             once
```
"""

import enum
from typing import Any

from scheduler.contracts import resume

BLAME_FIELD = "forebay_blame"  # beside the error that a batch line gets for a lost replica


class Blame(enum.StrEnum):
    """What part a request had in the loss of its replica, see `scheduler.core.suspects`."""

    ALONE = "alone"  # the only suspect there: it is at fault
    SHARED = "shared"  # it may be; it is tried apart from others that may be
    NONE = "none"  # another one is suspected


class ForebayError(Exception):
    """Base of every error that a caller may see.

    `grpc_status` names a member of `grpc.StatusCode`: gRPC itself is not loaded inside engines.

    Args:
        message: one line: what, where, what to do.
        retry_after_s: seconds until a retry makes sense, or None if it does not or is not known.
        param: the request's field at fault, if one is.

    Attributes:
        limits: headers that tell what is left of the caller's quotas.
    """

    code = "internal"
    status = 500
    grpc_status = "INTERNAL"
    kind = "server_error"  # OpenAI's `error.type`
    retryable = False

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param
        self.limits: tuple[tuple[str, str], ...] = ()

    def openai(self) -> dict[str, dict[str, str | None]]:
        """Return the OpenAI error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class Internal(ForebayError):
    """A fault of ours."""


class BadRequest(ForebayError):
    """The request can't be served as it is."""

    code = "bad_request"
    status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "invalid_request_error"


class ContextTooLong(BadRequest):
    """Prompt plus max_tokens exceed the model's context."""

    code = "context_length_exceeded"


class BodyTooLarge(BadRequest):
    """The body is over the configured limit."""

    code = "body_too_large"
    status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class BodyLate(BadRequest):
    """The body did not come in time."""

    code = "body_late"
    status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class LargerThanQuota(BadRequest):
    """The request asks for more than one of its quotas holds when nothing is used."""

    code = "request_larger_than_quota"


class Unauthenticated(ForebayError):
    """No credential, or one that is not known."""

    code = "invalid_api_key"
    status = 401
    grpc_status = "UNAUTHENTICATED"
    kind = "invalid_request_error"


class KeyExpired(Unauthenticated):
    """The API key was good once: it has expired or was revoked."""

    code = "api_key_expired"


class Forbidden(ForebayError):
    """The caller is known and may not do this."""

    code = "forbidden"
    status = 403
    grpc_status = "PERMISSION_DENIED"
    kind = "invalid_request_error"


class NotFound(ForebayError):
    """There is no such thing, or the caller may not know of it."""

    code = "not_found"
    status = 404
    grpc_status = "NOT_FOUND"
    kind = "invalid_request_error"


class ModelNotFound(NotFound):
    """No such model, version or adapter for this caller."""

    code = "model_not_found"


class Shed(ForebayError):
    """Refused before any work because the queue for this tier is full."""

    code = "overloaded"
    status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "rate_limit_error"
    retryable = True


class QuotaExceeded(ForebayError):
    """A team's, user's or key's own quota or budget is used up; the fleet may have room."""

    code = "quota_exceeded"
    status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "insufficient_quota"
    retryable = True


class Expired(ForebayError):
    """The deadline passed, or can't be met."""

    code = "deadline_exceeded"
    status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    retryable = True


class NoReplica(ForebayError):
    """No replica of this model is up and none came in time."""

    code = "no_replica"
    status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class ReplicaLost(ForebayError):
    """The replica died or went silent in the middle of the answer.

    Attributes:
        blame: for the batch runner, what part its line had in that.
    """

    code = "replica_lost"
    status = 502
    grpc_status = "UNAVAILABLE"
    retryable = True
    blame: Blame | None = None

    def openai(self) -> dict[str, Any]:
        """Return the OpenAI error body, with what the batch runner needs beside it."""
        body: dict[str, Any] = super().openai()
        return body if self.blame is None else {**body, BLAME_FIELD: self.blame.value}


class Draining(ReplicaLost):
    """The replica leaves and its time is up; no fault of the request's."""

    code = "draining"


class EngineFailed(ReplicaLost):
    """The engine failed on this request; others go on there."""

    code = "engine_failed"


class Busy(ForebayError):
    """This process has as many connections, calls or checks of credentials under way as it takes."""

    code = "busy"
    status = 503
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class Preempted(ForebayError):
    """A batch sequence gave its seat to interactive work.

    Attributes:
        resume: `scheduler.contracts.resume.Resume` as JSON values, if what was sampled is known: for the
            batch runner, in a field of that module's name beside the error.
    """

    code = "preempted"
    status = 503
    grpc_status = "ABORTED"
    retryable = True
    resume: dict[str, Any] | None = None

    def openai(self) -> dict[str, Any]:
        """Return the OpenAI error body, with what the batch runner needs beside it."""
        body: dict[str, Any] = super().openai()
        return body if self.resume is None else {**body, resume.FIELD: self.resume}


class RecordingUnavailable(ForebayError):
    """The usage record can't be written, so nothing is served."""

    code = "recording_unavailable"
    status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class Cancelled(ForebayError):
    """The caller cancelled, or went away."""

    code = "cancelled"
    status = 499
    grpc_status = "CANCELLED"


def _tree(base: type[ForebayError]) -> dict[str, type[ForebayError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        found = {**_tree(child), **found}
    return found


BY_CODE: dict[str, type[ForebayError]] = {**_tree(ForebayError), Internal.code: Internal}


def from_code(code: str, message: str) -> ForebayError:
    """Rebuild an error that crossed a process boundary; an unknown code becomes `Internal`."""
    return BY_CODE.get(code, Internal)(message)
