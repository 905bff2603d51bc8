"""What the gateway's answer to a line means for the line: pure.

| answer | verdict | counts against the line |
| --- | --- | --- |
| 200 with a JSON object | OK | – |
| code `preempted` | PREEMPTED | no |
| 429 (no room, no quota), 401, `busy`, `no_replica`, `deadline_exceeded` | WAIT | no |
| `recording_unavailable`, no connection, 499: the runner itself did not read | WAIT | no |
| code `replica_lost`, and another line is suspected of it | BYSTANDER | no |
| the same, and it may have been this line | SUSPECT | yes |
| the same, and it was this line: no other suspect was there | GUILTY | yes; after two it is set aside |
| other 5xx, 408, a cut connection, a broken body | RETRY | yes |
| other 4xx | REFUSED, final | – |
"""

import dataclasses
import enum
import zlib
from typing import Any

from batch_jobs import jsontext
from scheduler.contracts import errors

NOT_SENT = 0  # no connection
CUT = -1  # the connection broke before the answer was whole
TOO_LATE = -2  # no answer within batch_jobs.request_timeout_s


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a line.

    Attributes:
        status: the HTTP status, or `NOT_SENT`, `CUT` or `TOO_LATE`.
        body: the response's bytes.
        request_id: the gateway's id of the request, or "".
        retry_after_s: as the gateway asked, or 0.
    """

    status: int
    body: bytes = b""
    request_id: str = ""
    retry_after_s: float = 0.0


class Verdict(enum.Enum):
    """What to do with the line."""

    OK = "ok"
    REFUSED = "refused"
    PREEMPTED = "preempted"
    WAIT = "wait"
    BYSTANDER = "bystander"
    SUSPECT = "suspect"
    GUILTY = "guilty"
    RETRY = "retry"


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with the error's code and message, and the parsed body if it is a JSON object."""

    verdict: Verdict
    code: str = ""
    message: str = ""
    body: dict[str, Any] | None = None

    @property
    def of_quota(self) -> bool:
        """Whether it is the team's own quota that is used up, and no lack of room."""
        return self.code == errors.QuotaExceeded.code


_WAIT_CODES = frozenset(
    {
        errors.Shed.code,
        errors.Busy.code,
        errors.NoReplica.code,
        errors.RecordingUnavailable.code,
        errors.Expired.code,
    }
)
_BLAMED = {
    errors.Blame.ALONE.value: Verdict.GUILTY,
    errors.Blame.NONE.value: Verdict.BYSTANDER,
}
_VERSION = b'"forebay_version"'  # within a text its quotes are escaped


def judge(answer: Answer) -> Judged:
    """Say what an answer means."""
    if answer.status == NOT_SENT:
        return Judged(Verdict.WAIT, "no_connection", "the gateway can't be reached")
    if answer.status == CUT:
        return Judged(Verdict.RETRY, "connection_lost", "the connection to the gateway broke")
    if answer.status == TOO_LATE:
        return Judged(Verdict.RETRY, "request_timeout", "no answer came in time")
    body = _object(answer.body)
    if answer.status == 200:
        if body is None:
            return Judged(Verdict.RETRY, "invalid_answer", "the answer is not a JSON object")
        return Judged(Verdict.OK, body=body)
    code, message = _error(answer.status, body)
    verdict = _failure(answer.status, code)
    if code == errors.ReplicaLost.code:
        verdict = _BLAMED.get(str((body or {}).get(errors.BLAME_FIELD)), Verdict.SUSPECT)
    return Judged(verdict, code, message, body)


def _failure(status: int, code: str) -> Verdict:
    if code == errors.Preempted.code:
        return Verdict.PREEMPTED
    if status in {401, 429, 499} or code in _WAIT_CODES:
        return Verdict.WAIT
    if status >= 500 or status == 408:
        return Verdict.RETRY
    return Verdict.REFUSED


def alone(judged: Judged, payload: bytes) -> bool:
    """Return whether a line waits for what is its user's own: a quota, or a version that it names itself.

    Such a refusal says nothing of other users' lines of the model.

    Args:
        judged: why it waits.
        payload: the line's body.
    """
    return judged.of_quota or (judged.code == errors.NoReplica.code and _VERSION in payload)


def longest_wait_s(judged: Judged, asked_s: float, *, room_s: float, quota_s: float) -> float:
    """Return the longest wait before a line that waits is offered again.

    Args:
        judged: why it waits.
        asked_s: Retry-After, 0 if none was told.
        room_s: longest wait for room in the fleet: a gap should not stay empty.
        quota_s: longest wait for the team's own quota, which may be hours off or be raised meanwhile.
    """
    if not judged.of_quota:
        return room_s
    return max(room_s, min(asked_s or quota_s, quota_s))


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = jsontext.read(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _error(status: int, body: dict[str, Any] | None) -> tuple[str, str]:
    error = (body or {}).get("error")
    error = error if isinstance(error, dict) else {}
    code = str(error.get("code") or f"http_{status}")
    return code, " ".join(str(error.get("message") or f"HTTP {status}").split())[:500]


def backoff_s(
    attempt: int, *, first_s: float, most_s: float, key: int, asked_s: float = 0.0
) -> float:
    """Return how long to wait before the next try: exponential, with the jitter of the line itself.

    Args:
        attempt: tries so far, from 1.
        first_s: wait after the first.
        most_s: longest wait.
        key: the line's number; lines that failed together come back spread over half the wait.
        asked_s: Retry-After; never waits less, unless that is beyond ``most_s``.
    """
    full = min(most_s, first_s * 2.0 ** min(attempt - 1, 30))
    spread = zlib.crc32(f"{key}.{attempt}".encode()) / 0xFFFFFFFF
    return max(full * (0.5 + 0.5 * spread), min(asked_s, most_s))


def used(body: dict[str, Any] | None) -> tuple[int, int, int] | None:
    """Return the prompt tokens, cached ones among them and output tokens of an answer that counts any."""
    said = (body or {}).get("usage")
    if not isinstance(said, dict):
        return None
    prompt = _whole(said, "prompt_tokens", "input_tokens")
    output = _whole(said, "completion_tokens", "output_tokens")
    details = said.get("prompt_tokens_details") or said.get("input_tokens_details")
    cached = _whole(details, "cached_tokens") if isinstance(details, dict) else 0
    return prompt, cached, output


def _whole(said: dict[str, Any], *names: str) -> int:
    for name in names:
        value = said.get(name)
        if type(value) is int and value >= 0:
            return value
    return 0
