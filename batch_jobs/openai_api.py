"""The OpenAI Batch API over the same jobs: /v1/files and /v1/batches, mounted behind the gateway's door.

A batch is a batch job and nothing else: fqueue shows it, fcancel ends it, and a job of fbatch is a batch
here. What a caller may not see does not exist for them.
"""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import fastapi
import fastapi.responses
import starlette.datastructures
import starlette.requests
import starlette.types

from batch_jobs import (
    files,
    intake,
    lines,
    model,
    openai_shape,
    queue_acts,
    routes,
    settings,
    sites,
    submission,
)
from batch_jobs import store as stores
from scheduler.contracts import clock as clocks
from scheduler.contracts import errors, requests

_CHUNK = 1 << 20
_FORM = 1 << 16  # what a form takes beside its file
_FIELDS = frozenset(
    {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
)
Request = routes.Request


def router(
    store: stores.Store,
    *,
    state_dir: Path,
    options: settings.BatchJobsSettings,
    clock: clocks.Clock,
    site: sites.Site | None = None,
) -> fastapi.APIRouter:
    """Return the routes; arguments as those of `routes.router`."""
    kept = files.Files(store, state_dir, options.team_storage_bytes)
    uploads = _Uploads(store, kept, state_dir, clock)
    acts = queue_acts.Acts(store, options, clock, {}, site or sites.Site())
    batches = _Batches(store, uploads, options, acts)
    found = fastapi.APIRouter(prefix="/v1", route_class=_Route)
    found.add_api_route("/files", uploads.upload, methods=["POST"])
    found.add_api_route("/files", uploads.listed, methods=["GET"])
    found.add_api_route("/files/{file_id}", uploads.show, methods=["GET"])
    found.add_api_route("/files/{file_id}", uploads.delete, methods=["DELETE"])
    found.add_api_route(
        "/files/{file_id}/content", uploads.content, methods=["GET"], response_model=None
    )
    found.add_api_route("/batches", batches.create, methods=["POST"])
    found.add_api_route("/batches", batches.listed, methods=["GET"])
    found.add_api_route("/batches/{batch_id}", batches.show, methods=["GET"])
    found.add_api_route("/batches/{batch_id}/cancel", batches.cancel, methods=["POST"])
    return found


class _Route(routes.Route):
    """Answers our errors in OpenAI's shape, faults of a field among them."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def answer(request: Request) -> fastapi.Response:
            try:
                return await handler(request)
            except openai_shape.ShapeError as fault:
                refused = errors.BadRequest(str(fault), param=fault.param)
                return fastapi.responses.JSONResponse(refused.openai(), refused.status)

        return answer


class _Uploads:
    """/v1/files."""

    def __init__(
        self, store: stores.Store, kept: files.Files, state_dir: Path, clock: clocks.Clock
    ) -> None:
        self.kept = kept
        self.state_dir = state_dir
        self.clock = clock
        self._store = store

    async def upload(self, request: Request) -> dict[str, Any]:
        """Keep a file for later batches."""
        caller = routes.caller_of(request)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > openai_shape.MAX_BYTES + _FORM:
            raise _too_large()
        bounded = starlette.requests.Request(request.scope, _counting(request.receive))
        async with bounded.form(max_files=1, max_fields=8) as form:
            part, purpose = form.get("file"), form.get("purpose")
            if not isinstance(part, starlette.datastructures.UploadFile):
                raise errors.BadRequest(
                    "file: is missing: send it as multipart/form-data", param="file"
                )
            if purpose != "batch":
                raise errors.BadRequest(
                    'purpose: must be "batch", files serve nothing else here', param="purpose"
                )
            if (part.size or 0) > openai_shape.MAX_BYTES:
                raise _too_large()
            asked = openai_shape.nested(form, "expires_after")
            keep_us = openai_shape.keep_s("expires_after", asked) * 1_000_000
            now = self.clock.wall_us()
            draft = files.StoredFile(
                "",
                caller.team,
                caller.user,
                "batch",
                (part.filename or "batch.jsonl").replace("\0", "")[:512],
                0,
                now,
                now + keep_us if keep_us else 0,
            )
            await asyncio.to_thread(self.kept.check, caller.team, part.size or 0)
            try:
                found = await asyncio.to_thread(self.kept.add, part.file, draft)
            except OSError as error:
                raise errors.RecordingUnavailable(
                    f"the file can't be kept: {error.strerror}; try again later"
                ) from error
        return found.public()

    async def listed(self, request: Request) -> dict[str, Any]:
        """List the caller's files, newest first: uploads, and those of jobs."""
        caller = routes.caller_of(request)
        limit = openai_shape.limit(request.query_params.get("limit"), default=10_000, most=10_000)
        purpose = request.query_params.get("purpose")
        found = await asyncio.to_thread(self._all, caller)
        found.sort(key=lambda each: (each.created_us, each.file_id))
        if request.query_params.get("order") != "asc":
            found.reverse()
        if purpose:
            found = [each for each in found if each.purpose == purpose]
        after = request.query_params.get("after")
        if after:
            ids = [each.file_id for each in found]
            if after not in ids:
                raise errors.BadRequest(f"after: there is no file {after[:80]!r}", param="after")
            found = found[ids.index(after) + 1 :]
        shown = [each.public() for each in found[:limit]]
        return openai_shape.page(shown, more=len(found) > limit)

    def _all(self, caller: requests.Caller) -> list[files.StoredFile]:
        team = None if caller.admin else caller.team
        user = None if caller.admin or caller.coordinator else caller.user
        found = self.kept.list(team, user)
        wanted = stores.Filter(
            teams=(team,) if team is not None else (),
            users=(user,) if user is not None else (),
            kept=True,
        )
        for job in self._store.list(wanted):
            parts = ("output", "errors") if job.input_file else openai_shape.PARTS
            for part in parts:
                each = self.kept.of_job(job, part, self.state_dir)
                if each is not None:
                    found.append(each)
        return found

    async def show(self, request: Request, file_id: str) -> dict[str, Any]:
        """Show one file."""
        found, _ = await self.find(request, file_id)
        return found.public()

    async def content(self, request: Request, file_id: str) -> fastapi.Response:
        """Download a file."""
        found, path = await self.find(request, file_id)
        return fastapi.responses.FileResponse(
            path, media_type="application/octet-stream", filename=found.name
        )

    async def delete(self, request: Request, file_id: str) -> dict[str, Any]:
        """Remove a file; a batch that was made of it has its own copy."""
        found, _ = await self.find(request, file_id)
        named = openai_shape.job_file(file_id)
        if named is None:
            await asyncio.to_thread(self.kept.delete, found.file_id)
        elif named[1] == "input":
            raise errors.BadRequest(f"{file_id} is part of job {named[0]}: it goes when that does")
        else:
            await asyncio.to_thread(self.kept.delete_result, *named, self.state_dir)
        return {"id": file_id, "object": "file", "deleted": True}

    async def find(self, request: Request, file_id: str) -> tuple[files.StoredFile, Path]:
        """Return a file that the caller may see, and where its bytes are.

        Raises:
            errors.NotFound: there is none, or it is not theirs.
        """
        caller = routes.caller_of(request)
        missing = errors.NotFound(f"there is no file {file_id[:80]!r}, or it is not yours")
        named = openai_shape.job_file(file_id)
        if named is None:
            found = await asyncio.to_thread(self.kept.get, file_id)
            path = self.kept.path(file_id) if found else Path()
            if found and found.expires_us and found.expires_us <= self.clock.wall_us():
                raise missing
        else:
            job = await asyncio.to_thread(self._store.get, named[0])
            if job is None:
                raise missing
            found = await asyncio.to_thread(self.kept.of_job, job, named[1], self.state_dir)
            path = intake.job_folder(self.state_dir, named[0]) / openai_shape.PARTS[named[1]]
            if found and found.expires_us and found.expires_us <= self.clock.wall_us():
                raise missing
        if found is None or not routes.visible(found, caller):
            raise missing
        return found, path


class _Batches:
    """/v1/batches."""

    def __init__(
        self,
        store: stores.Store,
        uploads: _Uploads,
        options: settings.BatchJobsSettings,
        acts: queue_acts.Acts,
    ) -> None:
        self._acts = acts
        self._store = store
        self._uploads = uploads
        self._options = options

    async def create(self, request: Request) -> dict[str, Any]:
        """Make a job of an uploaded file. What is wrong with the whole file makes it a failed one."""
        caller = routes.caller_of(request)
        body = await _object(request)
        now = self._uploads.clock.wall_us()
        job = _draft(body, caller, now)
        found, path = await self._uploads.find(request, job.input_file)
        if found.purpose != "batch":
            raise errors.BadRequest(
                f"input_file_id: {found.file_id} was made by a batch", param="input_file_id"
            )
        await asyncio.to_thread(self._uploads.kept.check, job.team, found.bytes)
        served = await asyncio.to_thread(self._acts.served, "")
        rules = lines.Rules(only=job.endpoint, models=caller.models, served=served)
        taken = await asyncio.to_thread(
            intake.Intake, self._uploads.state_dir, rules, self._options.max_line_bytes
        )
        try:
            report = await asyncio.to_thread(_read, taken, path)
            job = submission.filled(dataclasses.replace(job, name=found.name[:256]), report, now)
            if fault := _fault(report):
                job = dataclasses.replace(
                    job,
                    state=model.State.FAILED,
                    reason=model.Reason.LAUNCH_FAILED,
                    detail=fault,
                    ended_us=now,
                )
            else:
                await asyncio.to_thread(self._acts.room, job, report.tokens.all)
            job = await asyncio.to_thread(self._store.add, job, taken.place)
        except OSError as error:
            raise errors.RecordingUnavailable(
                f"the batch can't be kept: {error.strerror}; try again later"
            ) from error
        finally:
            await asyncio.to_thread(taken.discard)
        return openai_shape.batch(job)

    async def listed(self, request: Request) -> dict[str, Any]:
        """List the caller's batches, newest first."""
        caller = routes.caller_of(request)
        limit = openai_shape.limit(request.query_params.get("limit"), default=20, most=100)
        after = request.query_params.get("after")
        before = 0
        if after:
            before = (await self._job(request, after)).job_id
        wanted = stores.Filter(
            teams=() if caller.admin else (caller.team,),
            users=() if caller.admin or caller.coordinator else (caller.user,),
            before=before,
        )
        jobs = await asyncio.to_thread(self._store.list, wanted, limit + 1, newest=True)
        shown = [openai_shape.batch(job) for job in jobs[:limit]]
        return openai_shape.page(shown, more=len(jobs) > limit)

    async def show(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Show one batch."""
        return openai_shape.batch(await self._job(request, batch_id))

    async def cancel(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Ask for a batch's end: what is answered stays."""
        job = await self._job(request, batch_id)
        if job.state.final:
            raise errors.BadRequest(
                f"batch {batch_id} is {openai_shape.status(job)}: only one under way can be cancelled"
            )
        now = self._uploads.clock.wall_us()
        await asyncio.to_thread(self._store.cancel, job.job_id, now)
        return openai_shape.batch(await self._job(request, batch_id))

    async def _job(self, request: Request, batch_id: str) -> model.BatchJob:
        number = openai_shape.job_id(batch_id)
        job = None if number is None else await asyncio.to_thread(self._store.get, number)
        if job is None or not routes.visible(job, routes.caller_of(request)):
            raise errors.NotFound(f"there is no batch {batch_id[:80]!r}, or it is not yours")
        return job


def _draft(body: dict[str, Any], caller: requests.Caller, now_us: int) -> model.BatchJob:
    """Check everything but the file."""
    if stray := sorted(body.keys() - _FIELDS):
        raise errors.BadRequest(f"{stray[0][:64]!r} is no field of a batch", param=stray[0][:64])
    file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file_id, str) or not file_id:
        raise errors.BadRequest("input_file_id: is missing", param="input_file_id")
    if not isinstance(endpoint, str) or endpoint not in lines.ENDPOINTS:
        known = ", ".join(sorted(lines.ENDPOINTS))
        raise errors.BadRequest(f"endpoint: must be one of {known}", param="endpoint")
    window = body.get("completion_window")
    seconds = openai_shape.window_s(window)
    said = openai_shape.metadata(body.get("metadata"))
    keep_s = openai_shape.keep_s("output_expires_after", body.get("output_expires_after"))
    wish = submission.Submission.model_validate({"endpoint": endpoint})
    drafted = submission.draft(wish, caller, now_us)
    return dataclasses.replace(
        drafted,
        door=model.Door.OPENAI,
        input_file=file_id,
        window=str(window),
        metadata=json.dumps(said),
        output_keep_s=keep_s,
        deadline_us=now_us + seconds * 1_000_000,
        source=file_id,
    )


def _read(taken: intake.Intake, path: Path) -> intake.Report:
    with path.open("rb") as file:
        while (chunk := file.read(_CHUNK)) and taken.total <= openai_shape.MAX_LINES:
            taken.feed(chunk)
    return taken.finish()


def _fault(report: intake.Report) -> str:
    if report.total > openai_shape.MAX_LINES:
        most = openai_shape.MAX_LINES
        return f"the file has more than {most} requests: split it, or submit it with fbatch"
    if not report.total:
        return "the file has no request in it"
    return ""


async def _object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise errors.BadRequest("the body is not JSON") from None
    if not isinstance(body, dict):
        raise errors.BadRequest("the body must be a JSON object")
    return body


def _counting(receive: starlette.types.Receive) -> starlette.types.Receive:
    """Return ``receive`` for a body that does not say its length: it may fill no disk."""
    size = 0

    async def counting() -> starlette.types.Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > openai_shape.MAX_BYTES + _FORM:
            raise _too_large()
        return message

    return counting


def _too_large() -> errors.BodyTooLarge:
    most = openai_shape.MAX_BYTES >> 20
    return errors.BodyTooLarge(f"file: larger than {most} MB: split it, or submit it with fbatch")
