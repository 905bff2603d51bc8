"""The batch jobs' HTTP surface under /forebay/v1/jobs, mounted by the gateway behind its own authentication.

`request.state.caller` says who asks; nothing that a request says of itself is believed. A job that the
caller may not see does not exist for them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import fastapi
import fastapi.responses
import fastapi.routing
import pydantic
import sqlalchemy.exc
import starlette.requests

from batch_jobs import (
    files,
    foretold,
    intake,
    lines,
    model,
    parquet,
    queue_acts,
    results,
    settings,
    sites,
    submission,
)
from batch_jobs import store as stores
from scheduler.contracts import clock as clocks
from scheduler.contracts import errors, requests

PREFIX = "/forebay/v1/jobs"
Request = starlette.requests.Request


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
    shares: Mapping[str, float] | None = None,
    site: sites.Site | None = None,
) -> fastapi.APIRouter:
    """Return the routes.

    Args:
        store: the registry's batch jobs.
        state_dir: where jobs' files are kept; the batch runner sees the same folder.
        options: the [batch_jobs] table.
        clock: time.
        shares: the teams' shares, 1 where one is not named.
        site: what submissions are checked against.
    """
    acts = queue_acts.Acts(store, options, clock, shares or {}, site or sites.Site())
    api = _Api(store, state_dir, options, clock, acts)
    found = fastapi.APIRouter(prefix=PREFIX, route_class=Route)
    found.add_api_route("", api.submit, methods=["POST"])
    found.add_api_route("", api.list, methods=["GET"])
    found.add_api_route("/{job_id}", api.show, methods=["GET"])
    found.add_api_route("/{job_id}/cancel", api.cancel, methods=["POST"])
    found.add_api_route("/{job_id}/hold", api.hold, methods=["POST"])
    found.add_api_route("/{job_id}/release", api.release, methods=["POST"])
    found.add_api_route("/{job_id}/requeue", api.requeue, methods=["POST"])
    found.add_api_route("/{job_id}/top", api.top, methods=["POST"])
    found.add_api_route("/{job_id}", api.update, methods=["PATCH"])
    found.add_api_route("/{job_id}/follow", api.follow, methods=["GET"])
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
        acts: queue_acts.Acts,
    ) -> None:
        self._store = store
        self._state_dir = state_dir
        self._options = options
        self._clock = clock
        self._acts = acts
        self._files = files.Files(store, state_dir, options.team_storage_bytes)

    async def submit(self, request: Request) -> dict[str, Any]:
        """Take a JSONL file as the body, check every line, make a job of it."""
        caller = caller_of(request)
        wish = submission.read(request.query_params.get("options", "{}"))
        job = submission.draft(wish, caller, self._clock.wall_us())
        await asyncio.to_thread(self._acts.check, job, caller)
        rules = lines.Rules(
            model=wish.model,
            endpoint=wish.endpoint,
            models=caller.models,
            served=self._acts.served(wish.model),
        )
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
                shown = await asyncio.to_thread(self._acts.test, job, report)
                return {"job_id": None, **report.public(), **shown}
            submission.refuse(report, wish)
            await asyncio.to_thread(self._acts.room, job, report.tokens.all)
            job = submission.filled(job, report, self._clock.wall_us())
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
        placed = await asyncio.to_thread(self._acts.placed, now)
        said: dict[str, Any] = {"jobs": [{**job.public(now), **placed(job)} for job in jobs]}
        if request.query_params.get("estimates"):
            starts = await asyncio.to_thread(self._store.foretold, foretold.LAST)
            said["estimates"] = foretold.error(starts).public()
        return said

    async def show(self, request: Request, job_id: str) -> dict[str, Any]:
        """Show one job. Reads only: however often it is asked, nothing is written."""
        return (await self._job(request, job_id)).public(self._clock.wall_us())

    async def cancel(self, request: Request, job_id: str) -> dict[str, Any]:
        """Ask for a job's end, which is the runner's to bring; `ended`: there was nothing to end."""
        jobs = await self._jobs(request, job_id)
        now = self._clock.wall_us()
        asked = [await asyncio.to_thread(self._store.cancel, job.job_id, now) for job in jobs]
        return {"job_id": jobs[0].job_id, "ended": not any(asked)}

    async def hold(self, request: Request, job_id: str) -> dict[str, Any]:
        """Hold a pending job."""
        jobs = await self._jobs(request, job_id)
        caller = caller_of(request)
        by = "admin" if caller.admin and caller.user != jobs[0].user else "user"
        return await self._hold(jobs, by, caller)

    async def release(self, request: Request, job_id: str) -> dict[str, Any]:
        """Release a held job; what an admin holds, an admin releases."""
        jobs = await self._jobs(request, job_id)
        caller = caller_of(request)
        if not caller.admin:
            _refuse_admins(jobs)
        return await self._hold(jobs, "", caller)

    async def _hold(
        self, jobs: Sequence[model.BatchJob], by: str, caller: requests.Caller
    ) -> dict[str, Any]:
        done = [
            await asyncio.to_thread(self._store.hold, job.job_id, by, admin=caller.admin)
            for job in jobs
        ]
        if not any(done):
            if not caller.admin:
                _refuse_admins(jobs)
            raise errors.BadRequest(f"job {jobs[0].shown_id} is not pending")
        return {"job_id": jobs[0].job_id}

    async def requeue(self, request: Request, job_id: str) -> dict[str, Any]:
        """Put a running job back into the queue; its lines keep what they have."""
        jobs = await self._jobs(request, job_id)
        await asyncio.to_thread(self._acts.each, self._acts.requeue, jobs)
        return {"job_id": jobs[0].job_id}

    async def top(self, request: Request, job_id: str) -> dict[str, Any]:
        """Put a pending job before its user's others."""
        jobs = await self._jobs(request, job_id)
        await asyncio.to_thread(self._acts.each, self._acts.top, jobs)
        return {"job_id": jobs[0].job_id}

    async def update(self, request: Request, job_id: str) -> dict[str, Any]:
        """Change a job that waits."""
        jobs = await self._jobs(request, job_id)
        caller = caller_of(request)
        try:
            wish = queue_acts.Change.model_validate_json(await request.body())
        except pydantic.ValidationError as error:
            raise submission.field_fault(error) from None
        await asyncio.to_thread(
            self._acts.each, lambda job: self._acts.update(job, wish, caller), jobs
        )
        return {"job_id": jobs[0].job_id}

    async def follow(self, request: Request, job_id: str) -> dict[str, Any]:
        """Return the answers behind a place in the journal, as they come."""
        job = await self._job(request, job_id)
        try:
            after = _number(request.query_params.get("after", "0"))
        except ValueError:
            raise errors.BadRequest("after: must be a whole number", param="after") from None
        folder = intake.job_folder(self._state_dir, job.job_id)
        found, following = await asyncio.to_thread(results.following, folder, after)
        return {"lines": found, "next": following}

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
        if name == results.OUTPUT and job.format == parquet.FORMAT:
            name = parquet.OUTPUT
        path = intake.job_folder(self._state_dir, job.job_id) / name
        if not path.is_file():
            raise errors.NotFound(f"job {job.job_id} has no such lines")
        return fastapi.responses.FileResponse(path, media_type="application/jsonl", filename=name)

    async def _job(self, request: Request, job_id: str) -> model.BatchJob:
        """Return the one job that an id names: of an array's id its first task."""
        return (await self._jobs(request, job_id))[0]

    async def _jobs(self, request: Request, job_id: str) -> Sequence[model.BatchJob]:
        """Return the jobs that an id names: of an array's all tasks."""
        caller = caller_of(request)
        number, _, task = job_id.partition("_")
        try:
            wanted, index = _number(number), _number(task) if task else None
        except ValueError as error:
            raise errors.BadRequest(str(error)) from None
        every = await asyncio.to_thread(self._store.fates, [wanted])
        found = [
            job
            for job in every
            if visible(job, caller)
            and (job.array_task == index if index is not None else True)
            and wanted in (job.array_id, job.job_id)
        ]
        if not found:
            shown = f"{number}_{task}" if task else number
            raise errors.NotFound(f"there is no job {shown}, or it is not yours")
        return found


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


def _refuse_admins(jobs: Sequence[model.BatchJob]) -> None:
    """Refuse to touch what an admin holds.

    Raises:
        errors.Forbidden: one of them is such.
    """
    for job in jobs:
        if job.held == "admin":
            raise errors.Forbidden(f"job {job.shown_id} is held by an admin: ask one to release it")


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
