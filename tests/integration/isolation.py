"""A gateway before eight simulated replicas in virtual time, and teams that load it."""

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from engines import private
from engines.replica import app as replica_app
from engines.replica import server as replica_server
from engines.replica import state
from engines.simulated import batching, core, replica
from gateway import app, assembly, dependencies, hotpath, server, settings
from scheduler.contracts import fleet, ids, ports, requests, usage
from tests import virtualtime

REPLICAS = 8
SEATS = 32
CONTEXT = 32_768
CHUNK = 512  # tokens of prefill in a step: what makes long prompts bearable for others
POISON = 7  # a prompt that begins with this id kills the engine that computes it
REVIVE_S = 5.0
PUBLISH_S = 0.2
NAMES = ("quiet", "noisy")


class _Core(core.SimulatedCore):
    """An engine that some prompts kill."""

    async def generate(
        self, request_id: str, sequences: Sequence[batching.Sequence]
    ) -> AsyncIterator[batching.Output]:
        poisoned = any(one.prompt[:1] == (POISON,) for one in sequences)
        inner: Any = super().generate(request_id, sequences)
        async with contextlib.aclosing(inner) as outputs:
            async for output in outputs:
                if poisoned:
                    self.die("illegal memory access")
                yield output


@dataclasses.dataclass
class One:
    """A replica, whichever engine is behind it now."""

    name: str
    secret_file: Path
    secret: str
    chunk: int
    address: str = ""
    incarnation: int = 0
    lives: int = 0
    stack: replica_app.Replica | None = None
    engine: replica.Simulated | None = None
    died: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def spec(self) -> fleet.ReplicaSpec:
        return fleet.ReplicaSpec(
            "chat",
            "1",
            fleet.EngineKind.SIMULATED,
            engine_args={"max-num-batched-tokens": self.chunk},
            seats=SEATS,
            max_context=CONTEXT,
        )

    async def live(self, clock: virtualtime.Clock) -> None:
        """Run one engine after the other, as a slot's supervisor does."""
        options = core.Options(
            model="chat", seats=SEATS, max_context=CONTEXT, kv_blocks=16_384, budget=self.chunk
        )
        while True:
            engine = replica.Simulated(options, clock)
            engine.core.__class__ = _Core  # the same engine, that a poisoned prompt kills
            about = state.About(self.name, model="chat", version="1")
            made = replica_app.build(
                engine,
                replica_app.Options(self.secret, fleet.Role.SHARED, SEATS, 1, about),
                sink=usage.MemorySink(),
                time=clock,
            )
            async with (
                engine.running(),
                replica_server.listening(made, "127.0.0.1") as (self.address, _),
            ):
                self.incarnation += 1
                self.stack, self.engine = made, engine
                while not engine.stats().failure:
                    await clock.sleep(PUBLISH_S)
                self.lives += 1
                self.engine = None
            await clock.sleep(REVIVE_S)

    async def seen(self) -> fleet.Replica:
        """Return the replica as the broker would publish it."""
        stats = None
        if self.engine is not None and self.stack is not None:
            stats = fleet.ReplicaStats(**(await _state(self.stack, self.secret))["stats"])
        return fleet.Replica(
            replica_id=ids.ReplicaId(self.name),
            cluster="c1",
            lease_id=ids.LeaseId("l-1"),
            slot_id=ids.SlotId(f"l-1.{self.name}"),
            slurm_job_id="1",
            node="n1",
            spec=self.spec(),
            state=fleet.ReplicaState.SERVING if stats else fleet.ReplicaState.LOST,
            role=fleet.Role.SHARED,
            address=self.address,
            incarnation=self.incarnation,
            secret_file=str(self.secret_file),
            stats=stats,
        )


async def _state(made: replica_app.Replica, secret: str) -> dict[str, Any]:
    """Ask a replica's state as its supervisor does, without a connection."""
    body = bytearray()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        body.extend(message.get("body", b""))

    headers = [(b"authorization", f"Bearer {secret}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/forebay/state", "headers": headers}
    await made(scope, receive, send)
    found: dict[str, Any] = json.loads(bytes(body))
    return found


@dataclasses.dataclass
class Site:
    """What runs: the gateway's port, its replicas, its rows."""

    port: int
    replicas: list[One]
    sink: usage.MemorySink
    gateway: assembly.Gateway
    clock: virtualtime.Clock


@contextlib.asynccontextmanager
async def running(
    tmp: Path, *, chunk: int = CHUNK, one_team: bool = False, **options: Any
) -> AsyncIterator[Site]:
    """Serve until the block ends; call inside `virtualtime.run`.

    Args:
        tmp: a folder.
        chunk: tokens of prefill in a step of the engines.
        one_team: both loads are of one team, and so take turns by deadline alone.
        options: the gateway's settings.
    """
    clock = virtualtime.Clock(asyncio.get_running_loop())
    replicas = []
    for number in range(REPLICAS):
        file = tmp / f"r{number}.secret"
        replicas.append(One(f"r{number}", file, private.new_secret(file), chunk))
    teams = {
        name: requests.Caller(
            "both" if one_team else name, name, f"key-{name}", tuple(requests.Tier)
        )
        for name in NAMES
    }
    source, sink = ports.StaticFleet(), usage.MemorySink()
    deps = dependencies.Dependencies(
        settings=settings.GatewaySettings(http_port=0, grpc_port=0, **options),
        authenticator=ports.StaticKeys(teams),
        fleet=source,
        sink=sink,
        clock=clock,
        cluster="c1",
    )

    async def publish() -> None:
        route = fleet.Route("chat", {"1": 100}, max_context=CONTEXT)
        for revision in range(1, 10**9):
            seen = tuple([await one.seen() for one in replicas])
            source.set(fleet.FleetView(1, revision, {"chat": route}, seen))
            await clock.sleep(PUBLISH_S)

    async with contextlib.AsyncExitStack() as kept:
        tasks = [asyncio.create_task(one.live(clock)) for one in replicas]
        await clock.sleep(1.0)
        tasks.append(asyncio.create_task(publish()))
        await clock.sleep(0.5)
        gateway = await kept.enter_async_context(assembly.running(deps))
        bound = kept.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        http = server._Uvicorn(server._config(app.create(gateway), hotpath.HotPath(gateway)))
        serving = asyncio.create_task(http.serve(sockets=[bound]))
        await clock.sleep(0.5)
        try:
            yield Site(bound.getsockname()[1], replicas, sink, gateway, clock)
        finally:
            http.stop()
            await serving
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a team sends: Poisson arrivals.

    Attributes:
        rate: requests a second.
        start: virtual seconds.
        end: the same.
        prompt: tokens, from and to.
        output: tokens, from and to.
        first: the first token id of each prompt.
    """

    rate: float
    start: float
    end: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    first: int = 1


@dataclasses.dataclass
class Heard:
    """What a team got."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    whole: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)

    def beside(self, other: "Heard") -> "Heard":
        """Return both together."""
        return Heard(
            self.ttft + other.ttft,
            self.gaps + other.gaps,
            self.whole + other.whole,
            self.failed + other.failed,
        )


async def drive(site: Site, team: str, load: Load, seed: int) -> Heard:
    """Send a team's load; returns once all of it has been answered."""
    rng = random.Random(seed)
    heard = Heard()
    loop = asyncio.get_running_loop()
    began = loop.time()
    at = load.start
    sent = []
    while (at := at + rng.expovariate(load.rate)) < load.end:
        await asyncio.sleep(max(0.0, began + at - loop.time()))
        prompt = [
            load.first,
            *(rng.randrange(300, 700) for _ in range(rng.randint(*load.prompt) - 1)),
        ]
        asked = {
            "model": "chat", "prompt": prompt, "stream": True,
            "max_tokens": rng.randint(*load.output), "ignore_eos": True,
        }  # fmt: skip
        sent.append(asyncio.create_task(_one(site.port, team, asked, heard)))
    await asyncio.gather(*sent)
    return heard


async def _one(port: int, team: str, asked: dict[str, Any], heard: Heard) -> None:
    loop = asyncio.get_running_loop()
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {team}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = loop.time()
    writer.write(head.encode() + body)
    last, status, done, error = began, b"", False, b""
    try:
        while line := await reader.readline():
            now = loop.time()
            if not status:
                status = line
            elif line.startswith(b"data: [DONE]"):
                done = True
            elif b'"error"' in line:
                error = line
            elif line.startswith(b"data: "):
                (heard.ttft if last == began else heard.gaps).append(now - last)
                last = now
    finally:
        writer.close()
    if done and not error:
        heard.whole += 1
    else:
        heard.failed.append((error or status).decode()[:300])


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
