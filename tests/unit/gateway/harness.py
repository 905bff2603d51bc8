"""A gateway on loopback, and replicas that answer from a script: frames, refusals, cuts, resets."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from gateway import dependencies, server, settings
from scheduler.contracts import (
    clock,
    fleet,
    frames,
    ports,
    quota,
    requests,
    tracing,
    trunks,
    usage,
)
from tests.unit.gateway import fleets

SECRET = "s3cret"
NO_TRUNK = b"HTTP/1.1 404 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
ANN = requests.Caller("physics", "ann", "key-ann", tuple(requests.Tier))
BOB = requests.Caller("chem", "bob", "key-bob", (requests.Tier.STANDARD,), models=("chat",))
SERVICE = requests.Caller("forebay", "svc", "key-svc", tuple(requests.Tier), service=True)
KEYS = {"ann": ANN, "bob": BOB, "svc": SERVICE}
ANN_AUTH = {"Authorization": "Bearer ann"}


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return once ``condition`` holds; it is looked at again and again, so it may be of any kind."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - states of two servers, none of which has an event
            await asyncio.sleep(0.002)


@dataclasses.dataclass
class Received:
    """A request as the replica got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def identity(self) -> usage.Identity:
        return usage.Identity(
            **json.loads(urllib.parse.unquote(self.headers["x-forebay-identity"]))
        )


class Out:
    """The script's hand on the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._begun = False
        self.keep = True
        self.left = asyncio.create_task(reader.read(1))  # ends when the gateway closes
        self.left.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def send(self, *items: frames.Frame) -> None:
        await self.raw(b"".join(item.encode() for item in items))

    async def raw(self, data: bytes) -> None:
        """Send bytes of the frame stream as one chunk."""
        if not self._begun:
            self._begun = True
            self._writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
                % frames.MEDIA_TYPE.encode()
            )
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self._writer.drain()

    def hold_little(self) -> None:
        """Let the kernel keep no more than a little of what was sent and not read."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)

    async def finish(self, *, prompt: int = 5, cached: int = 0, output: int = 3) -> None:
        await self.send(frames.End(("stop",), prompt, cached, output).frame())
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def error(self, error: frames.Error) -> None:
        await self.send(error.frame())
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def json(self, status: int, value: Any) -> None:
        await self.plain(status, json.dumps(value).encode())

    async def plain(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        self._writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        await self._writer.drain()

    async def reset(self) -> None:
        """End the connection with a TCP RST, as a killed process does; what was written arrives first."""
        await until(lambda: not self._writer.transport.get_write_buffer_size())
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        self.keep = False

    async def gone(self) -> None:
        """Return when the gateway has closed the connection."""
        with contextlib.suppress(ConnectionError):
            await self.left
        self.keep = False


Script = Callable[[Received, Out], Awaitable[None]]


class FakeReplica:
    """A replica's HTTP surface on loopback, driven by a script."""

    def __init__(self, script: Script, name: str = "r1") -> None:
        self.script = script
        self.name = name
        self.received: list[Received] = []
        self.running = 0
        self.ended = asyncio.Event()
        self.address = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeReplica"]:
        started = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = started.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            started.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await started.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        out: Out | None = None
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    received = await _read(reader)
                    if received is None:
                        writer.write(NO_TRUNK)
                        break
                    out = Out(reader, writer)
                    self.received.append(received)
                    self.running += 1
                    try:
                        await self.script(received, out)
                    finally:
                        self.running -= 1
                        self.ended.set()
                    if not out.keep:
                        break
                    out.left.cancel()
                    await asyncio.wait({out.left})
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            if out is not None and not out.left.done():
                out.left.cancel()
            self._tasks.discard(task)
            writer.close()

    def replica(self, tmp: Path, **changes: Any) -> fleet.Replica:
        secret = tmp / f"{self.name}.secret"
        secret.write_text(SECRET)
        return fleets.make_replica(
            self.name, address=self.address, secret_file=str(secret), **changes
        )


async def _read(reader: asyncio.StreamReader) -> Received | None:
    """Return a request, None for a trunk's: a scripted replica has none."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    if first.split()[1] == trunks.PATH:
        return None
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    assert headers["authorization"] == f"Bearer {SECRET}"
    return Received(first.split()[1], headers, json.loads(body))


@dataclasses.dataclass
class Served:
    """A running gateway."""

    http: str
    grpc: str
    fleet: ports.StaticFleet
    sink: usage.MemorySink
    stop: asyncio.Event
    task: "asyncio.Task[None]"

    def closed(self) -> list[usage.UsageRow]:
        """Return the CLOSE rows, and check that every OPEN has exactly one; an amended one is left out."""
        rows = [row for row in self.sink.rows if isinstance(row, usage.UsageRow)]
        close: list[usage.UsageRow] = []
        for row in (row for row in rows if row.kind is usage.RowKind.CLOSE):
            before = [one for one in close if one.identity == row.identity]
            for one in before:
                assert row.ended_us > one.ended_us
                assert one.payer is not row.payer
                close.remove(one)
            close.append(row)
        keys = [(row.identity.request_id, row.identity.attempt) for row in close]
        assert len(set(keys)) == len(keys)
        opened = {
            (row.identity.request_id, row.identity.attempt)
            for row in rows
            if row.kind is usage.RowKind.OPEN
        }
        assert opened <= set(keys)
        return close

    def closed_yet(self) -> bool:
        """Whether there is a CLOSE row."""
        return any(getattr(row, "kind", "") == usage.RowKind.CLOSE for row in self.sink.rows)

    async def rows(self, count: int) -> list[usage.UsageRow]:
        """Wait until ``count`` CLOSE rows are there."""
        await until(
            lambda: (
                sum(getattr(row, "kind", "") == usage.RowKind.CLOSE for row in self.sink.rows)
                >= count
            )
        )
        return self.closed()

    async def idle(self) -> None:
        """Wait until the reported demand is empty: every guard closed, nobody waiting."""
        await until(
            lambda: (
                bool(self.fleet.demand)
                and not any(
                    sum(d.in_flight.values()) + sum(d.waiting.values()) for d in self.fleet.demand
                )
            )
        )

    def waiting(self) -> bool:
        """Whether an interactive request was reported as waiting."""
        return bool(self.fleet.demand and self.fleet.demand[0].waiting["interactive"])


@contextlib.asynccontextmanager
async def gateway(
    view: fleet.FleetView | None,
    *,
    routers: Any = (),
    authenticator: ports.Authenticator | None = None,
    quotas: quota.Quotas | None = None,
    tracer: tracing.Tracer | None = None,
    job_fate: Callable[[int], usage.Outcome] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve a gateway on free ports of loopback until the block ends."""
    table = settings.GatewaySettings(
        **{"http_port": 0, "grpc_port": 0, "report_s": 0.02, "drain_s": 2.0, **options}
    )
    source, sink, stop = ports.StaticFleet(view), usage.MemorySink(), asyncio.Event()
    deps = dependencies.Dependencies(
        settings=table,
        authenticator=authenticator or ports.StaticKeys(KEYS),
        fleet=source,
        sink=sink,
        clock=clock.SystemClock(),
        cluster="c1",
        quotas=quotas or quota.Unlimited(),
        tracer=tracer or tracing.NoTracer(),
        job_fate=job_fate,
    )
    found: asyncio.Future[server.Addresses] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        server.serve(deps, routers=routers, ready=found.set_result, stop=stop)
    )
    task.add_done_callback(lambda _: found.done() or found.cancel())
    with contextlib.suppress(asyncio.CancelledError):
        await found
    if task.done():
        task.result()
    where = found.result()
    served = Served(f"http://{where.http}", where.grpc, source, sink, stop, task)
    try:
        yield served
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def one_replica(script: Script, **options: Any) -> AsyncIterator[tuple[Served, FakeReplica]]:
    """Serve a gateway with one scripted replica."""
    with tempfile.TemporaryDirectory() as tmp:
        async with FakeReplica(script).listening() as fake:
            changes = options.pop("replica", {})
            view = fleets.make_view([fake.replica(Path(tmp), **changes)])
            async with gateway(view, **options) as served:
                yield served, fake


def chat_event(delta: dict[str, Any] | None, finish: str | None = None, **extra: Any) -> bytes:
    """Return one chat chunk as an SSE event; a None delta means a chunk without choices."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "chat",
        "choices": choices,
        **extra,
    }
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def data(payload: bytes, *token_ids: int) -> frames.Frame:
    return frames.Frame.of(frames.Kind.DATA, payload, token_ids)


DONE = data(b"data: [DONE]\n\n")
PROMPT = frames.Frame.of(frames.Kind.PROMPT, token_ids=(1, 2, 3, 4, 5))
FINAL = frames.Frame.of(frames.Kind.PROMPT, b"its sampling is seeded", (1, 2, 3, 4, 5))
USED = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


async def hello(received: Received, out: Out) -> None:
    """Answer ``Hello world`` in three tokens, streamed or whole, chat or completion."""
    if not received.body.get("stream"):
        await out.send(PROMPT, data(json.dumps(whole(received)).encode(), 7, 8, 9))
        await out.finish()
        return
    await out.send(PROMPT, data(chat_event({"role": "assistant", "content": ""})))
    await out.send(data(chat_event({"content": "Hello"}), 7))
    await out.send(data(chat_event({"content": " world"}), 8))
    await out.send(data(chat_event({}, "stop"), 9))
    if (received.body.get("stream_options") or {}).get("include_usage"):
        await out.send(data(chat_event(None, usage=USED)))
    await out.send(DONE)
    await out.finish()


def whole(received: Received) -> dict[str, Any]:
    """Return a complete answer to a chat or completion request."""
    base = {"id": "x", "created": 1, "model": received.body["model"], "usage": USED}
    if received.path == "/v1/chat/completions":
        message = {"role": "assistant", "content": "Hello world"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {**base, "object": "chat.completion", "choices": [choice]}
    choice = {"index": 0, "text": "Hello world", "finish_reason": "stop", "logprobs": None}
    return {**base, "object": "text_completion", "choices": [choice]}


async def hang(received: Received, out: Out) -> None:
    """Send one token (of a stream) and then nothing until the gateway leaves."""
    if received.body.get("stream"):
        await out.send(PROMPT, data(chat_event({"content": "a"}), 7))
    await out.gone()


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **changes}
