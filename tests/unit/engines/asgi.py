"""Calls an ASGI app in process and keeps what it sends."""

import asyncio
import dataclasses
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from starlette import types

from scheduler.contracts import frames, usage

SECRET = "s3cret"


@dataclasses.dataclass(slots=True)
class Call:
    """One call: leave it with `leave`, wait for bytes with `got`."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytearray = dataclasses.field(default_factory=bytearray)
    ended: bool = False
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    arrived: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(bytes(self.body))

    @property
    def all(self) -> list[frames.Frame]:
        decoder = frames.Decoder()
        found = list(decoder.feed(bytes(self.body)))
        assert decoder.empty, "bytes after the last whole frame"
        return found

    @property
    def client_bytes(self) -> bytes:
        return b"".join(f.payload for f in self.all if f.kind is frames.Kind.DATA)

    def token_ids(self, choice: int = 0) -> list[int]:
        data = [f for f in self.all if f.kind is frames.Kind.DATA and f.choice == choice]
        return [token_id for frame in data for token_id in frame.token_ids]

    @property
    def end(self) -> frames.End:
        assert self.all[-1].kind is frames.Kind.END, self.all[-1]
        return frames.End.parse(self.all[-1].payload)

    @property
    def error(self) -> frames.Error:
        assert self.all[-1].kind is frames.Kind.ERROR, self.all[-1]
        return frames.Error.parse(self.all[-1].payload)

    async def send(self, message: types.Message) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a second status"
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert self.status, "bytes before a status"
            assert not self.ended, "bytes after the end"
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)
            if message.get("body"):
                self.arrived.set()


def identity(request_id: str = "r1", tier: str = "interactive", attempt: int = 1) -> usage.Identity:
    return usage.Identity(
        request_id=request_id,
        attempt=attempt,
        cluster="c",
        team="team",
        user="u",
        key_id="k",
        model="m",
        version="1",
        adapter="",
        endpoint="/v1/completions",
        tier=tier,
        replica_id="r-1",
        lease_id="l-1",
        slurm_job_id="7",
        arrived_us=1,
        started_us=2,
    )


def headers(
    who: usage.Identity | None = None, *, framed: bool = True, secret: str = SECRET
) -> dict[str, str]:
    found = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    if framed:
        found["accept"] = frames.MEDIA_TYPE
    if who is not None:
        fields = json.dumps(dataclasses.asdict(who), separators=(",", ":"))
        found["x-forebay-identity"] = urllib.parse.quote(fields)
        found["x-request-id"] = f"{who.request_id}.{who.attempt}"
    return found


async def run(
    app: types.ASGIApp,
    method: str,
    path: str,
    given: Mapping[str, str],
    body: Any = None,
    call: Call | None = None,
) -> Call:
    """Make one call to its end."""
    call = call or Call()
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> types.Message:
        if messages:
            return messages.pop()
        await call.left.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    await app(scope, receive, call.send)
    return call


async def post(
    app: types.ASGIApp,
    who: usage.Identity,
    body: Any = None,
    *,
    framed: bool = True,
    call: Call | None = None,
    preempted: int = 0,
) -> Call:
    """Send one inference request to `/v1/completions`."""
    given = headers(who, framed=framed)
    if preempted:
        given["x-forebay-preempted"] = str(preempted)
    value = {"prompt": "x"} if body is None else body
    return await run(app, "POST", "/v1/completions", given, value, call)


def rows(sink: usage.MemorySink) -> list[usage.UsageRow]:
    """Return the rows of attempts that a sink took."""
    return [row for row in sink.rows if isinstance(row, usage.UsageRow)]
