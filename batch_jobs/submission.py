"""What a submission may ask, and the job that it becomes: everything but its lines."""

import dataclasses
import os
import pwd
from typing import Any

import pydantic

from batch_jobs import arrays, intake, lines, model, parquet, patterns
from scheduler.contracts import errors, requests, times


class Submission(pydantic.BaseModel):
    """The options of a submission, in the query parameter ``options`` as JSON."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str = pydantic.Field("fbatch", min_length=1, max_length=256)
    account: str = ""
    comment: str = pydantic.Field("", max_length=4096)
    model: str = pydantic.Field("", max_length=256)
    endpoint: str = ""
    order: str = "completion"
    strict_lines: bool = False
    test_only: bool = False
    hold: bool = False
    begin_us: int = pydantic.Field(0, ge=0, le=times.LAST_US)
    deadline_us: int = pydantic.Field(0, ge=0, le=times.LAST_US)
    time_limit_s: int = pydantic.Field(0, ge=0, le=times.LAST_US // 1_000_000)
    output: str = pydantic.Field("", max_length=4096)
    error: str = pydantic.Field("", max_length=4096)
    cwd: str = pydantic.Field("", max_length=4096)
    umask: int = pydantic.Field(0o077, ge=0, le=0o777)
    source: str = pydantic.Field("", max_length=4096)
    dependency: str = pydantic.Field("", max_length=4096)
    qos: str = pydantic.Field("", max_length=64)
    priority: int = pydantic.Field(0, ge=-10_000, le=1_000_000)
    requeue: bool = True
    format: str = "jsonl"
    array_id: int = pydantic.Field(0, ge=0, le=2**31 - 1)
    array_task: int = pydantic.Field(-1, ge=-1, le=arrays.MOST_INDEX)
    array_limit: int = pydantic.Field(0, ge=0, le=arrays.MOST_TASKS)

    @pydantic.field_validator("*")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("must not contain a NUL character")
        return value


def read(options: str) -> Submission:
    """Read a submission's options.

    Raises:
        errors.BadRequest: which is at fault.
    """
    try:
        return Submission.model_validate_json(options)
    except pydantic.ValidationError as error:
        raise field_fault(error) from None


def field_fault(error: pydantic.ValidationError) -> errors.BadRequest:
    """Return the first field at fault in our words."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "options"
    return errors.BadRequest(f"{where}: {first['msg']}", param=where)


def draft(wish: Submission, caller: requests.Caller, now_us: int) -> model.BatchJob:
    """Check everything but the lines and return the job without them."""
    if requests.Tier.BATCH not in caller.tiers and not caller.admin:
        raise errors.Forbidden("your credential may not name tier batch: ask an admin for it")
    if wish.account and wish.account != caller.team and not caller.admin:
        raise errors.Forbidden(f"you may not charge account {wish.account!r}, only {caller.team!r}")
    if wish.endpoint and wish.endpoint not in lines.ENDPOINTS:
        known = ", ".join(sorted(lines.ENDPOINTS))
        raise errors.BadRequest(f"endpoint {wish.endpoint!r}: use one of {known}", param="endpoint")
    if wish.deadline_us and wish.deadline_us <= max(now_us, wish.begin_us):
        raise errors.BadRequest(
            "the deadline has passed, or comes before the begin", param="deadline"
        )
    if wish.format not in {"jsonl", parquet.FORMAT}:
        raise errors.BadRequest("format must be jsonl or parquet", param="format")
    if wish.priority > 0 and not caller.admin:
        raise errors.Forbidden("--priority above 0 is an admin's to give: give 0 or less")
    if wish.order not in set(model.Order):
        raise errors.BadRequest("order must be input or completion", param="order")
    uid, gid = _unix(caller.user)
    output, error = _targets(wish, uid)
    return model.BatchJob(
        job_id=0,
        team=wish.account or caller.team,
        user=caller.user,
        uid=uid,
        gid=gid,
        umask=wish.umask,
        name=wish.name,
        comment=wish.comment,
        model=wish.model,
        endpoint=wish.endpoint,
        order=model.Order(wish.order),
        begin_us=wish.begin_us,
        deadline_us=wish.deadline_us,
        time_limit_s=wish.time_limit_s,
        held="user" if wish.hold else "",
        output_path=output,
        error_path=error,
        source=wish.source,
        dependency=wish.dependency,
        qos=wish.qos,
        priority=wish.priority,
        requeue=wish.requeue,
        format=wish.format,
        array_id=wish.array_id,
        array_task=wish.array_task,
        array_limit=wish.array_limit,
    )


def _unix(user: str) -> tuple[int | None, int | None]:
    """Return the Unix ids of a caller's user; (None, None) if this host does not know them."""
    try:
        entry = pwd.getpwnam(user)
    except (KeyError, ValueError):
        return None, None
    return entry.pw_uid, entry.pw_gid


def _targets(wish: Submission, uid: int | None) -> tuple[str, str]:
    """Return the patterns of both result files, absolute, or "" where nothing can be published."""
    plain = "fbatch-%A_%a" if wish.array_task >= 0 else "fbatch-%j"
    output = wish.output or (f"{plain}.{wish.format}" if wish.cwd else "")
    beside = (
        output.removesuffix(f".{parquet.FORMAT}") + ".jsonl" if wish.format != "jsonl" else output
    )
    error = wish.error or (patterns.error_beside(beside) if output else "")
    found = []
    for option, pattern in (("output", output), ("error", error)):
        try:
            patterns.check(pattern, array=wish.array_task >= 0)
        except patterns.PatternError as fault:
            raise errors.BadRequest(f"--{option}: {fault}", param=option) from None
        if wish.array_task >= 0 and pattern and not patterns.tells_tasks(pattern):
            raise errors.BadRequest(
                f"--{option}: {pattern!r} would be one file for all tasks, each over the one before: "
                "put %a into it",
                param=option,
            )
        path = os.path.join(wish.cwd, pattern) if pattern else ""  # noqa: PTH118 - the user's text as it is
        if path and (not path.startswith("/") or "\0" in path or path.endswith("/")):
            raise errors.BadRequest(f"--{option}: {pattern!r} is no path of a file", param=option)
        found.append(path)
    if output and found[0] == found[1]:
        raise errors.BadRequest("--output and --error must be two files", param="error")
    if uid is None or os.geteuid() not in {0, uid}:
        if wish.output or wish.error:
            raise errors.BadRequest(
                "--output and --error need a Unix user whose files this service may write: leave them "
                "out and download the results",
                param="output",
            )
        return "", ""
    return found[0], found[1]


def refuse(report: intake.Report, wish: Submission) -> None:
    """Refuse a file of which nothing may be submitted.

    Raises:
        errors.BadRequest: why.
    """
    if not report.total:
        raise errors.BadRequest("the file has no request in it")
    if report.bad and wish.strict_lines:
        first = report.shown[0]
        raise errors.BadRequest(
            f"{report.bad} of {report.total} lines are bad, nothing was submitted (--strict); "
            f"the first is line {first.number}: {first.message}"
        )


def filled(job: model.BatchJob, report: intake.Report, now_us: int) -> model.BatchJob:
    """Return the job with what validation found."""
    return dataclasses.replace(
        job,
        counts=model.Counts(total=report.total, failed=report.bad),
        last_line=report.last_line,
        input_sha256=report.sha256,
        submitted_us=now_us,
        stored_bytes=report.bytes,
        queued_tokens=report.tokens.all,
    )
