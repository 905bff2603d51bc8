"""A job as the OpenAI Batch API shows it, and what that API asks of a batch and its files. Pure.

Files of a job have ids made from the job's: ``file-job-12-input``, ``-output``, ``-errors``. So a job that
came in through fbatch has them too, and nothing has to be written when a job ends.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from batch_jobs import model, results

MAX_LINES = 50_000
MAX_BYTES = 200 * 1024 * 1024
MAX_METADATA = 16
_KEY_CHARS, _VALUE_CHARS = 64, 512
_KEEP_S = range(3_600, 2_592_001)
_WINDOW = re.compile(r"([1-9]\d{0,3})([hd])", re.ASCII)
_LONGEST_S = 14 * 86_400
_BATCH = re.compile(r"batch_([1-9]\d{0,17})", re.ASCII)
_FILE = re.compile(r"file-job-([1-9]\d{0,17})-(input|output|errors)", re.ASCII)
PARTS = {"input": results.INPUT, "output": results.OUTPUT, "errors": results.ERRORS}


class ShapeError(ValueError):
    """A field that is not as that API asks; the message is for the caller.

    Args:
        param: the field.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def batch_id(job_id: int) -> str:
    """Return a job's id there."""
    return f"batch_{job_id}"


def job_id(text: str) -> int | None:
    """Return the job's id in a batch's, or None if it is none."""
    match = _BATCH.fullmatch(text)
    return int(match[1]) if match else None


def file_id(job: int, part: str) -> str:
    """Return the id of a job's file: input, output or errors."""
    return f"file-job-{job}-{part}"


def job_file(text: str) -> tuple[int, str] | None:
    """Return the job and part that a file's id names, or None if it is an upload's."""
    match = _FILE.fullmatch(text)
    return (int(match[1]), match[2]) if match else None


def window_s(text: Any) -> int:
    """Read `completion_window`: 24h, and what is of its form, up to 14 days.

    Raises:
        ShapeError: it is something else.
    """
    match = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match[1]) * (3_600 if match[2] == "h" else 86_400) if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ShapeError("completion_window", 'give hours or days up to 14d, as in "24h"')
    return seconds


def metadata(value: Any) -> dict[str, str]:
    """Check `metadata`.

    Raises:
        ShapeError: too many pairs, too long ones, or none at all.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ShapeError("metadata", "must be an object of texts")
    if len(value) > MAX_METADATA:
        raise ShapeError("metadata", f"has {len(value)} pairs, {MAX_METADATA} are allowed")
    for key, text in value.items():
        if not isinstance(text, str) or not key or "\0" in key + str(text):
            raise ShapeError("metadata", f"the value of {key[:64]!r} must be a text")
        if len(key) > _KEY_CHARS or len(text) > _VALUE_CHARS:
            limits = f"{_KEY_CHARS} characters of a key and {_VALUE_CHARS} of a value"
            raise ShapeError("metadata", f"{key[:64]!r} is too long: {limits} are allowed")
    return dict(value)


def keep_s(param: str, value: Any) -> int:
    """Read ``{"anchor": "created_at", "seconds": N}``; 0 for none.

    Raises:
        ShapeError: it is something else.
    """
    if value is None:
        return 0
    if not isinstance(value, dict) or value.get("anchor") != "created_at":
        raise ShapeError(param, 'must be {"anchor": "created_at", "seconds": …}')
    seconds = value.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():
        seconds = int(seconds[:12])  # a form's fields are texts
    if type(seconds) is not int or seconds not in _KEEP_S:
        raise ShapeError(param, f"seconds must be from {_KEEP_S[0]} to {_KEEP_S[-1]}")
    return seconds


def status(job: model.BatchJob) -> str:
    """Return the state's name there; a job that waits again after it had run stays in progress."""
    match job.state:
        case model.State.PENDING:
            if job.cancel_us:
                return "cancelling"
            return "in_progress" if job.started_us else "validating"
        case model.State.RUNNING:
            return "cancelling" if job.cancel_us else "in_progress"
        case model.State.COMPLETING:
            return "cancelling" if job.cancel_us else "finalizing"
        case _:
            return _FINAL[job.state]


_FINAL = {
    model.State.COMPLETED: "completed",
    model.State.FAILED: "failed",
    model.State.CANCELLED: "cancelled",
    model.State.TIMEOUT: "expired",
}


def _seconds(point_us: int) -> int | None:
    return point_us // 1_000_000 if point_us else None


def batch(job: model.BatchJob) -> dict[str, Any]:
    """Return a job as a batch object."""
    final = job.state.final
    ended = {state: _seconds(job.ended_us) if job.state is state else None for state in _FINAL}
    there = final and not job.purged_us
    used = job.used
    return {
        "id": batch_id(job.job_id),
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model or None,
        "errors": _errors(job),
        "input_file_id": job.input_file or file_id(job.job_id, "input"),
        "completion_window": job.window or "24h",
        "status": status(job),
        "output_file_id": file_id(job.job_id, "output") if there and job.counts.ok else None,
        "error_file_id": file_id(job.job_id, "errors") if there and job.counts.failed else None,
        "created_at": _seconds(job.submitted_us) or 0,
        "in_progress_at": _seconds(job.started_us),
        "expires_at": _seconds(job.deadline_us),
        "finalizing_at": _seconds(job.finalizing_us),
        "completed_at": ended[model.State.COMPLETED],
        "failed_at": ended[model.State.FAILED],
        "expired_at": ended[model.State.TIMEOUT],
        "cancelling_at": _seconds(job.cancel_us),
        "cancelled_at": ended[model.State.CANCELLED],
        "request_counts": {
            "total": job.counts.total,
            "completed": job.counts.ok,
            "failed": job.counts.failed,
        },
        "metadata": json.loads(job.metadata) or None,
        "usage": {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt_tokens + used.output_tokens,
        },
    }


def _errors(job: model.BatchJob) -> dict[str, Any] | None:
    if job.state is not model.State.FAILED:
        return None
    said = {"code": str(job.reason), "message": job.detail, "line": None, "param": None}
    return {"object": "list", "data": [said]}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it is kept: an upload, or one of a job's.

    Attributes:
        created_us: UTC µs.
        expires_us: UTC µs; 0: as long as the site keeps it.
    """

    file_id: str
    team: str
    user: str
    purpose: str
    name: str
    bytes: int
    created_us: int
    expires_us: int = 0

    def public(self) -> dict[str, Any]:
        """Return the file object."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": _seconds(self.created_us) or 0,
            "expires_at": _seconds(self.expires_us),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


def page(found: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """Return a list object."""
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": more,
    }


def limit(text: str | None, *, default: int, most: int) -> int:
    """Read `limit`.

    Raises:
        ShapeError: no whole number, or out of range.
    """
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise ShapeError("limit", f"must be a whole number from 1 to {most}")
    return int(text)


def nested(form: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return an object that a form spells as ``name[key]`` fields, or None."""
    prefix = f"{name}["
    found = {
        key[len(prefix) : -1]: value
        for key, value in form.items()
        if key.startswith(prefix) and key.endswith("]")
    }
    return found or None
