"""What the engine contract needs of an engine under test: a replica that listens, and its rows."""

import asyncio
import contextlib
import dataclasses
import json
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from engines.replica import app, server, state
from scheduler.contracts import clock, fleet, frames, usage
from tests.unit.engines import asgi

SEATS, RESERVED = 2, 1
SECRET = "contract-secret"
PATIENCE_S = 60.0


@dataclasses.dataclass(slots=True)
class Answer:
    """An answer, read to its end or to where it broke."""

    status: int
    content_type: str
    all: list[frames.Frame]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def client_bytes(self) -> bytes:
        return b"".join(f.payload for f in self.all if f.kind is frames.Kind.DATA)

    @property
    def ids(self) -> list[int]:
        data = (f for f in self.all if f.kind is frames.Kind.DATA)
        return [token_id for frame in data for token_id in frame.token_ids]

    @property
    def end(self) -> frames.End:
        assert self.all[-1].kind is frames.Kind.END, self.all[-1]
        return frames.End.parse(self.all[-1].payload)

    @property
    def error(self) -> frames.Error:
        assert self.all[-1].kind is frames.Kind.ERROR, self.all[-1]
        return frames.Error.parse(self.all[-1].payload)


@dataclasses.dataclass(slots=True)
class Subject:
    """A listening replica with `SEATS` seats, of which `RESERVED` are kept from batch, role shared.

    Attributes:
        address: its ``host:port``; its model is ``m``.
        session: a client.
        rows: returns the usage rows that it has left so far.
        token_ids: whether it knows token ids.
        slow: added to a body whose answer must take a second at least.
        kill: makes the engine die inside the living replica; None where that can't be done.
        abort_s: seconds that an abort takes to an engine in a process of its own; 0 for one in this.
    """

    address: str
    session: aiohttp.ClientSession
    rows: Callable[[], Awaitable[list[usage.UsageRow]]]
    token_ids: bool = True
    secret: str = SECRET
    slow: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"max_tokens": 1500, "ignore_eos": True}
    )
    kill: Callable[[], None] | None = None
    abort_s: float = 0.0

    async def call(
        self, method: str, path: str, body: Any = None, *, secret: str | None = None
    ) -> tuple[int, Any]:
        """Call a control path; returns status and JSON."""
        given = {"authorization": f"Bearer {self.secret if secret is None else secret}"}
        url = f"http://{self.address}{path}"
        async with self.session.request(method, url, json=body, headers=given) as response:
            return response.status, await response.json(content_type=None)

    async def ask(
        self,
        body: Mapping[str, Any],
        *,
        path: str = "/v1/completions",
        request_id: str = "q1",
        tier: str = "interactive",
        framed: bool = True,
        first: asyncio.Event | None = None,
        more: Mapping[str, str] = types.MappingProxyType({}),
    ) -> Answer:
        """Send one request and read its answer; ``first`` is set with the first bytes.

        Headers of the hop beside the usual ones are ``more``.
        """
        who = asgi.identity(request_id, tier)
        given = {**asgi.headers(who, framed=framed, secret=self.secret), **more}
        url = f"http://{self.address}{path}"
        async with self.session.post(url, json={"model": "m", **body}, headers=given) as response:
            kind = response.headers["content-type"]
            raw = bytearray()
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    raw += chunk
                    if first is not None:
                        first.set()
            decoder = frames.Decoder()
            found = list(decoder.feed(bytes(raw))) if kind == frames.MEDIA_TYPE else []
            return Answer(response.status, kind, found, bytes(raw))

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """Read the state until it fulfils ``condition``; returns it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                _, said = await self.call("GET", "/forebay/state")
                if condition(said):
                    return said
                await asyncio.sleep(0.01)

    async def row(self, request_id: str) -> usage.UsageRow:
        """Return the one row of a request, once it is there."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = [r for r in await self.rows() if r.identity.request_id == request_id]
                if found:
                    assert len(found) == 1, found
                    return found[0]
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(inner: Any, **changes: Any) -> AsyncIterator[Subject]:
    """Put the stack before an engine of this process and listen."""
    sink = usage.MemorySink()

    async def rows() -> list[usage.UsageRow]:
        return [row for row in sink.rows if isinstance(row, usage.UsageRow)]

    about = state.About(replica_id="r-1", model="m", version="1")
    options = app.Options(SECRET, fleet.Role.SHARED, SEATS, RESERVED, about)
    served = app.build(inner, options, sink=sink, time=clock.SystemClock())
    async with (
        server.listening(served, "127.0.0.1") as (address, _),
        aiohttp.ClientSession(trust_env=False) as session,
    ):
        yield Subject(address, session, rows, **changes)
