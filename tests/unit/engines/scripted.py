"""An engine whose answers a test scripts, for the stack before it."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette import types

from engines.replica import adapters, app, engine, state, steptime
from scheduler.contracts import clock, fleet, usage
from tests.unit.engines import asgi

Script = Callable[["Scripted", str, engine.Tap, types.Send], Awaitable[None]]


class Scripted:
    """`engine.Engine` that runs a script for each request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.taps = engine.Taps(lambda: 1_000)
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.started = asyncio.Event()
        self.failure = ""
        self.steps = 0
        self.port: adapters.AdapterPort | None = None
        self.sleeper: engine.SleepPort | None = None

    async def serve(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
            return
        assert not any(name == b"authorization" for name, _ in scope["headers"])
        key = dict(scope["headers"])[b"x-request-id"].decode()
        tap = self.taps.find(key)
        assert tap is not None
        self.running.add(key)
        self.started.set()
        try:
            await self.script(self, key, tap, send)
        finally:
            self.running.discard(key)

    @property
    def app(self) -> types.ASGIApp:
        return self.serve

    @property
    def adapters(self) -> adapters.AdapterPort | None:
        return self.port

    def tap(self, request_id: str) -> engine.Tap:
        return self.taps.open(request_id)

    def untap(self, request_id: str) -> None:
        self.taps.close(request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def observe(self, observer: Callable[[steptime.Step], None]) -> None:
        self.observer = observer

    def stats(self) -> engine.EngineStats:
        return engine.EngineStats(
            kv_blocks=8, kv_free=4, steps_total=self.steps, failure=self.failure
        )


def build(
    script: Script,
    sink: usage.UsageSink,
    *,
    seats: int = 2,
    reserved: int = 1,
    role: fleet.Role = fleet.Role.SHARED,
    time: clock.Clock | None = None,
    port: adapters.AdapterPort | None = None,
) -> tuple[Scripted, types.ASGIApp]:
    """Return an engine and the stack around it."""
    inner = Scripted(script)
    inner.port = port
    about = state.About(replica_id="r-1", model="m", version="1")
    options = app.Options(asgi.SECRET, role, seats, reserved, about)
    return inner, app.build(inner, options, sink=sink, time=time or clock.SystemClock())


async def begin(send: types.Send, kind: str = "text/event-stream", status: int = 200) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind.encode())],
        }
    )


async def part(send: types.Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def chunk(text: str, reason: str | None = None) -> bytes:
    end = "null" if reason is None else f'"{reason}"'
    return f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":{end}}}]}}\n\n'.encode()


async def whole(inner: Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
    """Stream `a b`, whole."""
    tap.prompt([1, 2, 3])
    tap.prefilled(3, cached=1)
    await begin(send)
    tap.emitted(0, [10])
    await part(send, chunk("a"))
    tap.emitted(0, [11])
    tap.finished(0, "stop")
    await part(send, chunk("b", "stop"))
    await part(send, b"data: [DONE]\n\n", more=False)


async def endless(inner: Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
    """Stream one token and then nothing, for ever."""
    tap.prompt([1, 2, 3])
    tap.prefilled(3)
    await begin(send)
    tap.emitted(0, [10])
    await part(send, chunk("a"))
    tap.sampled(1)
    await asyncio.Event().wait()


async def silent(inner: Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
    """Compute without an answer, as a non-streaming request does."""
    tap.prompt([1, 2, 3])
    tap.prefilled(3)
    tap.emitted(0, [10, 11])
    await asyncio.Event().wait()
