"""The batch jobs' HTTP surface under /forebay/v1/jobs, mounted by the gateway behind its own authentication.

`request.state.caller` says who asks; nothing that a request says of itself is believed. A job that the
caller may not see does not exist for them.
"""

import asyncio
import dataclasses
import os
import pwd
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import fastapi
import fastapi.responses
import fastapi.routing
import pydantic
import sqlalchemy.exc
import starlette.requests

from batch_jobs import files, intake, lines, model, patterns, results, settings
from batch_jobs import store as stores
from scheduler.contracts import clock as clocks
from scheduler.contracts import errors, requests, times

PREFIX = "/forebay/v1/jobs"
Request = starlette.requests.Request


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

    @pydantic.field_validator("*")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("must not contain a NUL character")
        return value


class Route(fastapi.routing.APIRoute):
    """Answers our errors in OpenAI's shape, whatever app the router is mounted in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, fastapi.Response]]:
        """Wrap the handler."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> fastapi.Response:
            try:
                return await handler(request)
            except errors.ForebayError as error:
                return fastapi.responses.JSONResponse(error.openai(), status_code=error.status)
            except sqlalchemy.exc.SQLAlchemyError:
                refused = errors.NoReplica("the registry does not answer: try again later")
                return fastapi.responses.JSONResponse(refused.openai(), status_code=503)

        return answer


def router(
    store: stores.Store,
    *,
    state_dir: Path,
    options: settings.BatchJobsSettings,
    clock: clocks.Clock,
) -> fastapi.APIRouter:
    """Return the routes.

    Args:
        store: the registry's batch jobs.
        state_dir: where jobs' files are kept; the batch runner sees the same folder.
        options: the [batch_jobs] table.
        clock: time.
    """
    api = _Api(store, state_dir, options, clock)
    found = fastapi.APIRouter(prefix=PREFIX, route_class=Route)
    found.add_api_route("", api.submit, methods=["POST"])
    found.add_api_route("", api.list, methods=["GET"])
    found.add_api_route("/{job_id}", api.show, methods=["GET"])
    found.add_api_route("/{job_id}/cancel", api.cancel, methods=["POST"])
    found.add_api_route("/{job_id}/hold", api.hold, methods=["POST"])
    found.add_api_route("/{job_id}/release", api.release, methods=["POST"])
    found.add_api_route("/{job_id}/output", api.output, methods=["GET"], response_model=None)
    found.add_api_route("/{job_id}/errors", api.errors, methods=["GET"], response_model=None)
    return found


class _Api:
    def __init__(
        self,
        store: stores.Store,
        state_dir: Path,
        options: settings.BatchJobsSettings,
        clock: clocks.Clock,
    ) -> None:
        self._store = store
        self._state_dir = state_dir
        self._options = options
        self._clock = clock
        self._files = files.Files(store, state_dir, options.team_storage_bytes)

    async def submit(self, request: Request) -> dict[str, Any]:
        """Take a JSONL file as the body, check every line, make a job of it."""
        caller = caller_of(request)
        wish = _submission(request)
        job = draft(wish, caller, self._clock.wall_us())
        rules = lines.Rules(model=wish.model, endpoint=wish.endpoint, models=caller.models)
        length = request.headers.get("content-length", "")
        await asyncio.to_thread(self._files.check, job.team, int(length) if length.isdigit() else 0)
        taken = await asyncio.to_thread(
            intake.Intake, self._state_dir, rules, self._options.max_line_bytes
        )
        try:
            async for chunk in request.stream():
                await asyncio.to_thread(taken.feed, chunk)
            report = await asyncio.to_thread(taken.finish)
            await asyncio.to_thread(self._files.check, job.team, report.bytes)
            if wish.test_only:
                return {"job_id": None, **report.public()}
            _refuse(report, wish)
            job = filled(job, report, self._clock.wall_us())
            job = await asyncio.to_thread(self._store.add, job, taken.place)
        except starlette.requests.ClientDisconnect as gone:
            raise errors.Cancelled("the upload was broken off") from gone
        except OSError as error:
            raise errors.RecordingUnavailable(
                f"the file can't be kept: {error.strerror}; try again later"
            ) from error
        finally:
            await asyncio.to_thread(taken.discard)
        paths = {"output_path": job.output_file, "error_path": job.error_file}
        return {"job_id": job.job_id, "user": job.user, **paths, **report.public()}

    async def list(self, request: Request) -> dict[str, Any]:
        """List the caller's jobs; a coordinator sees the team's, an admin all."""
        caller = caller_of(request)
        wanted = _filter(request, caller)
        if not caller.admin:
            if wanted.teams and caller.team not in wanted.teams:
                return {"jobs": []}
            mine = (caller.user,)
            if not caller.coordinator and wanted.users and caller.user not in wanted.users:
                return {"jobs": []}
            wanted = stores.Filter(
                ids=wanted.ids,
                teams=(caller.team,),
                users=wanted.users if caller.coordinator else mine,
                names=wanted.names,
                states=wanted.states,
            )
        jobs = await asyncio.to_thread(self._store.list, wanted)
        now = self._clock.wall_us()
        return {"jobs": [job.public(now) for job in jobs]}

    async def show(self, request: Request, job_id: str) -> dict[str, Any]:
        """Show one job. Reads only: however often it is asked, nothing is written."""
        return (await self._job(request, job_id)).public(self._clock.wall_us())

    async def cancel(self, request: Request, job_id: str) -> dict[str, Any]:
        """Ask for a job's end, which is the runner's to bring; `ended`: there was nothing to end."""
        job = await self._job(request, job_id)
        now = self._clock.wall_us()
        asked = await asyncio.to_thread(self._store.cancel, job.job_id, now)
        return {"job_id": job.job_id, "ended": not asked}

    async def hold(self, request: Request, job_id: str) -> dict[str, Any]:
        """Hold a pending job."""
        job = await self._job(request, job_id)
        by = "admin" if caller_of(request).admin and caller_of(request).user != job.user else "user"
        return await self._hold(job, by)

    async def release(self, request: Request, job_id: str) -> dict[str, Any]:
        """Release a held job; what an admin holds, an admin releases."""
        job = await self._job(request, job_id)
        if job.held == "admin" and not caller_of(request).admin:
            raise errors.Forbidden(f"job {job.job_id} is held by an admin: ask one to release it")
        return await self._hold(job, "")

    async def _hold(self, job: model.BatchJob, by: str) -> dict[str, Any]:
        if not await asyncio.to_thread(self._store.hold, job.job_id, by):
            raise errors.BadRequest(f"job {job.job_id} is not pending")
        return {"job_id": job.job_id}

    async def output(self, request: Request, job_id: str) -> fastapi.Response:
        """Download the answers."""
        return await self._file(request, job_id, results.OUTPUT)

    async def errors(self, request: Request, job_id: str) -> fastapi.Response:
        """Download the failed lines."""
        return await self._file(request, job_id, results.ERRORS)

    async def _file(self, request: Request, job_id: str, name: str) -> fastapi.Response:
        job = await self._job(request, job_id)
        if not job.state.final:
            raise errors.BadRequest(f"job {job.job_id} is {job.state}: its results come at its end")
        path = intake.job_folder(self._state_dir, job.job_id) / name
        if not path.is_file():
            raise errors.NotFound(f"job {job.job_id} has no such lines")
        return fastapi.responses.FileResponse(path, media_type="application/jsonl", filename=name)

    async def _job(self, request: Request, job_id: str) -> model.BatchJob:
        caller = caller_of(request)
        number, _, task = job_id.partition("_")
        try:
            job = await asyncio.to_thread(self._store.get, _number(number))
        except ValueError as error:
            raise errors.BadRequest(str(error)) from None
        if job is None or not visible(job, caller):
            raise errors.NotFound(f"there is no job {number}, or it is not yours")
        if task:
            raise errors.NotFound(f"job {number} is no array: it has no task {task[:40]}")
        return job


def caller_of(request: Request) -> requests.Caller:
    """Return who asks, as the gateway's authentication found."""
    return cast("requests.Caller", request.state.caller)


class Owned(Protocol):
    """Something that belongs to a user of a team."""

    @property
    def team(self) -> str:
        """Who pays."""
        ...

    @property
    def user(self) -> str:
        """Whose it is."""
        ...


def visible(owned: Owned, caller: requests.Caller) -> bool:
    """Whether a caller may know of it: their own, their team's as a coordinator, all as an admin."""
    same = owned.team == caller.team and (caller.coordinator or owned.user == caller.user)
    return caller.admin or same


def _submission(request: Request) -> Submission:
    try:
        return Submission.model_validate_json(request.query_params.get("options", "{}"))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        raise errors.BadRequest(f"{where}: {first['msg']}", param=where) from None


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
    output = wish.output or ("fbatch-%j.jsonl" if wish.cwd else "")
    error = wish.error or (patterns.error_beside(output) if output else "")
    found = []
    for option, pattern in (("output", output), ("error", error)):
        try:
            patterns.check(pattern)
        except patterns.PatternError as fault:
            raise errors.BadRequest(f"--{option}: {fault}", param=option) from None
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


def _refuse(report: intake.Report, wish: Submission) -> None:
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
    )


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(f"invalid job id {text[:40]!r}")
    return int(text)


def _filter(request: Request, caller: requests.Caller) -> stores.Filter:
    def values(name: str) -> Sequence[str]:
        return [value for value in request.query_params.get(name, "").split(",") if value]

    try:
        return stores.Filter(
            ids=tuple(_number(value) for value in values("ids")),
            teams=tuple(values("account")),
            users=(caller.user,) if values("me") else tuple(values("user")),
            names=tuple(values("name")),
            states=tuple(model.State(value) for value in values("state")),
        )
    except ValueError as error:
        raise errors.BadRequest(f"filter: {error}") from None
