"""What the tests of batch jobs stand in: a scripted gateway, an Api over the routes, a store that tells."""

import asyncio
import collections
import contextlib
import dataclasses
import io
import json
import multiprocessing
import threading
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastapi
from aiohttp import web
from fastapi import testclient

from batch_jobs import commands, daemon, intake, model, routes, settings, sites
from batch_jobs import store as stores
from scheduler.contracts import clock, command_line, errors, ports, requests
from scheduler.runtime.registry import database
from tests import registries

# Imports once; each process of a test is then a fork, killed by its own pid. What can't be imported is
# left out in silence, as this module would be: the fork server has none of pytest's paths.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "aiohttp.web",
        "alembic.command",
        "batch_jobs.commands",
        "batch_jobs.daemon",
        "batch_jobs.routes",
        "fastapi.testclient",
        "scheduler.runtime.registry.store",
        "sqlalchemy.dialects.sqlite",
    ]
)
ALICE = requests.Caller(team="physics", user="alice", key_id="k1", tiers=(requests.Tier.BATCH,))
QUICK = settings.BatchJobsSettings(
    first_backoff_s=0.001,
    max_backoff_s=0.005,
    max_wait_s=0.005,
    poll_s=0.01,
    max_line_bytes=64 * 1024,
)


def line(custom_id: str, **body: Any) -> bytes:
    """Return one good line of a batch file."""
    whole = {"model": "chat", "messages": [{"role": "user", "content": custom_id}], **body}
    fields = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": whole,
    }
    return json.dumps(fields).encode() + b"\n"


def many(count: int) -> bytes:
    """Return a file of good lines with ids c1, c2, …."""
    return b"".join(line(f"c{number}") for number in range(1, count + 1))


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer of the scripted gateway; status 0 cuts the connection."""

    status: int = 200
    code: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blame: str = ""


SHED = Reply(429, "overloaded", {"Retry-After": "0.001"})
PREEMPTED = Reply(503, "preempted")
LOST = Reply(502, "replica_lost")
LOST_ALONE = Reply(502, "replica_lost", blame="alone")
LOST_BESIDE = Reply(502, "replica_lost", blame="none")
CUT = Reply(0)
TOO_LONG = Reply(400, "context_length_exceeded")


class ScriptedGateway:
    """An aiohttp server that answers lines by a script; without one it answers 200."""

    def __init__(self) -> None:
        self.script: dict[str, list[Reply]] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.headers: list[Mapping[str, str]] = []
        self.in_flight = 0
        self.peak = 0
        self.url = ""
        self.before: Callable[[str], Awaitable[None]] | None = None  # before an answer goes out
        self.stuck: set[str] = set()  # ids that are never answered

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedGateway"]:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        custom_id = urllib.parse.unquote(request.headers["X-Forebay-Custom-Id"])
        self.calls[custom_id] += 1
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            body = await request.json()
            if custom_id in self.stuck:
                await asyncio.Event().wait()
            if self.before is not None:
                await self.before(custom_id)
            script = self.script.get(custom_id)
            return self._say(request, script.pop(0) if script else Reply(), body)
        finally:
            self.in_flight -= 1

    @staticmethod
    def _say(request: web.Request, reply: Reply, body: Mapping[str, Any]) -> web.StreamResponse:
        if reply.status == 0:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        headers = {"X-Forebay-Request-Id": "req-1", **reply.headers}
        if reply.status == 200:
            text = body["messages"][0]["content"]
            answer: dict[str, Any] = {"choices": [{"message": {"content": text}}]}
        else:
            answer = {"error": {"code": reply.code, "message": f"said {reply.code}", "type": "x"}}
            if reply.blame:
                answer[errors.BLAME_FIELD] = reply.blame
        return web.json_response(answer, status=reply.status, headers=headers)


class TellingStore(stores.Store):
    """A store whose moves and counts can be waited for."""

    def __init__(self, registry: database.Database) -> None:
        super().__init__(registry)
        self._changed = threading.Condition()

    def move(self, job: model.BatchJob, event: model.Event, **changes: Any) -> model.BatchJob:
        """Move a job, and wake who waits."""
        moved = super().move(job, event, **changes)
        with self._changed:
            self._changed.notify_all()
        return moved

    def tell(
        self,
        job_id: int,
        *,
        counts: model.Counts | None = None,
        reason: str | None = None,
        used: model.Used | None = None,
    ) -> None:
        """Set counts or reason, and wake who waits."""
        super().tell(job_id, counts=counts, reason=reason, used=used)
        with self._changed:
            self._changed.notify_all()

    async def until(
        self, job_id: int, holds: Callable[[model.BatchJob], bool], seconds: float = 30.0
    ) -> model.BatchJob:
        """Return the job once ``holds`` is true of it."""

        def wait() -> model.BatchJob:
            with self._changed:
                found = self._changed.wait_for(lambda: holds(self.must(job_id)), seconds)
            assert found, f"never true of {self.must(job_id)}"
            return self.must(job_id)

        return await asyncio.to_thread(wait)

    async def ended(self, job_id: int) -> model.BatchJob:
        """Return the job once it is in a final state."""
        return await self.until(job_id, lambda job: job.state.final)

    def must(self, job_id: int) -> model.BatchJob:
        """Return a job that is there."""
        job = self.get(job_id)
        assert job is not None
        return job


def open_store(state_dir: Path) -> TellingStore:
    """Open the registry of a state folder."""
    ready = registries.jobs_ready(state_dir)
    store = TellingStore(database.Database(database.sqlite_url(state_dir)))
    if not ready:
        store.migrate()
    return store


class AppApi:
    """`ports.Api` over the routes alone, with the caller that a test names."""

    def __init__(
        self,
        store: stores.Store,
        state_dir: Path,
        caller: requests.Caller = ALICE,
        options: settings.BatchJobsSettings = QUICK,
        time: clock.Clock | None = None,
        site: sites.Site | None = None,
    ) -> None:
        self.caller = caller
        app = fastapi.FastAPI()
        app.include_router(
            routes.router(
                store,
                state_dir=state_dir,
                options=options,
                clock=time or clock.SystemClock(),
                site=site,
            )
        )

        @app.middleware("http")
        async def authenticate(request: fastapi.Request, call: Any) -> Any:
            request.state.caller = self.caller
            return await call(request)

        self.client = testclient.TestClient(app)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> ports.ApiResponse:
        """Send one request, refuse as the real client does."""
        content = upload.read_bytes() if upload is not None else None
        answer = self.client.request(method, path, params=params, json=json, content=content)
        if answer.status_code >= 400:
            raise command_line.CommandError(answer.json()["error"]["message"])
        if download is not None:
            download.write_bytes(answer.content)
            return ports.ApiResponse(answer.status_code, None, b"")
        return ports.ApiResponse(answer.status_code, answer.json(), answer.content)

    def submit(self, data: bytes, **wish: Any) -> int:
        """Submit a file and return the job's id."""
        answer = self.client.post(routes.PREFIX, params={"options": json.dumps(wish)}, content=data)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["job_id"])


@dataclasses.dataclass(frozen=True)
class Said:
    """What a command printed and returned."""

    code: int
    out: str
    err: str


def run_command(
    name: str,
    argv: Sequence[str],
    api: ports.Api,
    cwd: Path,
    stdin: io.StringIO | None = None,
    **env: str,
) -> Said:
    """Call fbatch, fqueue or fcancel."""
    out, err = io.StringIO(), io.StringIO()
    code = getattr(commands, name)(
        argv,
        api=api,
        out=out,
        err=err,
        env={"TZ": "UTC", **env},
        cwd=cwd,
        stdin=stdin or io.StringIO(),
    )
    return Said(code, out.getvalue(), err.getvalue())


@contextlib.asynccontextmanager
async def daemon_running(
    store: stores.Store,
    state_dir: Path,
    url: str,
    options: settings.BatchJobsSettings = QUICK,
    key: str = "service",
) -> AsyncIterator[asyncio.Task[None]]:
    """Run the batch runner in this process, until the body ends."""
    ready = asyncio.Event()
    task = asyncio.create_task(
        daemon.serve(
            options,
            store=store,
            state_dir=state_dir,
            gateway_url=url,
            service_key=key,
            clock=clock.SystemClock(),
            ready=ready.set,
        )
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        waiting.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def file_lines(state_dir: Path, job_id: int, name: str) -> list[dict[str, Any]]:
    """Return the lines of one of a job's result files, none if there is no such file."""
    path = intake.job_folder(state_dir, job_id) / name
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_bytes().splitlines()]


def run_until_done(state_dir: str, url: str, job_id: int) -> None:
    """Be a batch runner, in a process of one's own, until a job has ended."""

    async def run() -> None:
        store = open_store(Path(state_dir))
        async with daemon_running(store, Path(state_dir), url) as task:
            done = asyncio.create_task(store.ended(job_id))
            await asyncio.wait({done, task}, return_when=asyncio.FIRST_COMPLETED)
        store.close()

    asyncio.run(run())


def hammer(url: str, rounds: int) -> None:
    """Insert, read and write in one transaction each, again and again, as gateways do."""
    store = stores.open_store(url)
    for _ in range(rounds):
        job = store.add(model.BatchJob(0, "physics", "alice"), lambda job_id: None)
        assert store.cancel(job.job_id, 1)
        store.move(job, model.Event.START)
    store.close()
