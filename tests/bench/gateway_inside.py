"""What the gateway's own code costs a request and a token, without sockets and without other processes.

`forebay gateway` with everything that it runs (registry, key, quotas, admission, routing, spool with its
syncs, metrics), except that its connections are made here: a client's request is handed to the protocol,
the replica's answer is ready, what is written is thrown away; tokens come on trunks, a step at a time.
So nothing but the gateway's code and its rows is in the figures, and short rounds can be compared on a
machine with other work: the least counts.

Usage: ``python -m tests.bench.gateway_inside [--rounds 200] [--report FILE]``; the last line is JSON.
With a report it measures again under cProfile, and writes where the time goes between the report's marks.
"""

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn import server as uvicorn_server

from gateway import app, assembly, dependencies, hotpath, protocol, server
from scheduler.contracts import trunks
from tests.bench import (
    gateway_forebay,
    gateway_load,
    gateway_mock,
    gateway_profile,
    report_marks,
)

_TRUNK = re.compile(trunks.HEADER.encode() + rb": ([^\r]+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
CONNECTIONS = 32
REQUESTS = 32  # a round: short, so that some are not interrupted
STREAMS = 64
TOKENS = 10  # a stream and round


class Wire(asyncio.Transport):
    """A transport that throws away what is written, or answers it.

    Attributes:
        seen: bytes written.
    """

    def __init__(self, answer: Callable[["Wire", bytes], None] | None = None) -> None:
        super().__init__()
        self.seen = 0
        self._answer = answer
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.seen += len(data)
        if self._answer is not None:
            self._answer(self, bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Loop(uvloop.Loop):
    """Connects to replicas that are not there.

    Attributes:
        trunks: the gateway's ends of trunks, with the numbers of their streams.
    """

    trunks: dict[str, tuple[asyncio.Protocol, list[int]]]

    async def create_connection(  # type: ignore[override]  # all that a hop asks for
        self, factory: Any, *_: Any, **__: Any
    ) -> Any:
        """Return a connection that answers by itself."""
        made = factory()

        def answer(_: Wire, data: bytes) -> None:
            named = _TRUNK.search(data)
            if data.startswith(b"POST " + trunks.PATH.encode()) and named is not None:
                self.trunks[named[1].decode()] = made, []
                said = gateway_mock.TRUNK
            elif not _STREAM.search(data):
                said = gateway_mock.WHOLE_FRAMED
            elif named is None:
                said = gateway_mock.FRAMED + gateway_mock.STREAM_BEGIN
            else:
                wanted = trunks.parse(named[1].decode())
                assert wanted is not None
                name, number = wanted
                trunk, streams = self.trunks[name]
                streams.append(number)
                begin = gateway_mock.record(streams[-1], gateway_mock.FIRST_FRAMES)
                self.call_soon(trunk.data_received, gateway_mock.chunk(begin))
                said = gateway_mock.FRAMED
            self.call_soon(made.data_received, said)

        wire = Wire(answer)
        made.connection_made(wire)
        return wire, made


class Count:
    """Wakes who waits for so many answers; asking again and again would cost CPU itself."""

    def __init__(self) -> None:
        self._left = 0
        self._done: asyncio.Future[None] | None = None

    def expect(self, answers: int) -> "asyncio.Future[None]":
        """Return what is done after so many answers."""
        self._left, self._done = answers, asyncio.get_running_loop().create_future()
        return self._done

    def __call__(self, _: Wire, data: bytes) -> None:
        """Count an answer."""
        self._left -= 1
        if not self._left and self._done is not None:
            self._done.set_result(None)


Profiles = Mapping[str, cProfile.Profile]


@contextlib.contextmanager
def watched(profiles: Profiles, name: str) -> Iterator[None]:
    """Profile a block, if a profile of that name is wanted."""
    profile = profiles.get(name)
    if profile is None:
        yield
        return
    profile.enable()
    try:
        yield
    finally:
        profile.disable()


async def measure(
    gateway: assembly.Gateway, token: str, rounds: int, profiles: Profiles
) -> dict[str, Any]:
    """Measure one gateway's requests and tokens, in µs of CPU."""
    config = uvicorn.Config(app.create(gateway, ()), log_config=None, lifespan="off")
    config.load()
    state = uvicorn_server.ServerState()
    hot = hotpath.HotPath(gateway)

    def client() -> tuple[Any, Wire]:
        made: Any = protocol.Protocol(hot, config=config, server_state=state, app_state={})
        wire = Wire(count)
        made.connection_made(wire)
        return made, wire

    count = Count()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost:1\r\ncontent-type: application/json\r\n"
        f"accept: application/json\r\nauthorization: Bearer {token}\r\ncontent-length: "
    ).encode()

    def ask(made: Any, body: bytes) -> None:
        made.data_received(b"%b%d\r\n\r\n%b" % (head, len(body), body))

    clients = [client() for _ in range(CONNECTIONS)]
    texts = gateway_load.bodies()
    each: list[float] = []
    for number in range(rounds + 5):
        batches = [[next(texts) for _ in clients] for _ in range(REQUESTS // CONNECTIONS)]
        began = time.process_time()
        with watched(profiles, "request"):
            for batch in batches:
                answered = count.expect(CONNECTIONS)
                for (made, _), body in zip(clients, batch, strict=True):
                    ask(made, body)
                await answered
        if number >= 5:
            each.append((time.process_time() - began) / REQUESTS * 1e6)
        await asyncio.sleep(0.005)
    assert all(wire.seen > 200 for _, wire in clients)
    loop: Any = asyncio.get_running_loop()
    endless = gateway_load.bodies(stream_tokens=100_000)
    listeners = [client() for _ in range(STREAMS)]
    early = [client() for _ in range(8)]  # the first streams to a replica open its trunk
    for some in (early, listeners):
        begun = count.expect(len(some))
        for made, _ in some:
            ask(made, next(endless))
        await begun
        await asyncio.sleep(0.1)
    steps = [
        (
            trunk.data_received,
            gateway_mock.chunk(b"".join(gateway_mock.record(n, token) for n in streams)),
        )
        for trunk, streams in loop.trunks.values()
        for token in gateway_mock.TOKEN_FRAMES[:1]
    ]
    assert sum(len(streams) for _, streams in loop.trunks.values()) == STREAMS
    tokens: list[float] = []
    for _ in range(rounds):
        began = time.process_time()
        with watched(profiles, "token"):
            for _ in range(TOKENS):
                for received, step in steps:
                    received(step)
        tokens.append((time.process_time() - began) / STREAMS / TOKENS * 1e6)
        await asyncio.sleep(0.005)
    sent = rounds * TOKENS * len(gateway_mock.TOKEN)
    assert all(wire.seen > sent for _, wire in listeners)
    for made, _ in early + listeners:
        made.connection_lost(None)
    await gateway.path.drain(5.0)
    return {
        name: {"least": round(min(found), 2), "median": round(statistics.median(found), 2)}
        for name, found in (("request", each), ("token", tokens))
    }


def run(rounds: int, profiles: Profiles) -> dict[str, Any]:
    """Run a gateway in this process and measure it."""
    found: dict[str, Any] = {}

    async def inside(deps: dependencies.Dependencies, **_: Any) -> None:
        async with assembly.running(deps) as gateway:
            await asyncio.sleep(0.3)  # the first view
            gc.collect()
            gc.freeze()
            found.update(await measure(gateway, here.token, rounds, profiles))

    server.serve = inside
    with tempfile.TemporaryDirectory(prefix="forebay-inside-") as name:
        here = gateway_forebay.Site(Path(name), ["127.0.0.1:1", "127.0.0.1:2"])
        Loop.trunks = {}
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(here.run(lambda news: None))
    return found


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--report", type=Path, help="write where the time goes into this file")
    asked = parser.parse_args()
    found = run(asked.rounds, {})
    if asked.report:
        profiles = {name: cProfile.Profile() for name in found}
        rounds = min(asked.rounds, 50)
        run(rounds, profiles)
        counts = {"request": (rounds + 5) * REQUESTS, "token": rounds * STREAMS * TOKENS}
        tables = [
            gateway_profile.table(f"A {name}", found[name], profiles[name], counts[name])
            for name in found
        ]
        report_marks.put(asked.report, "parts", "\n\n".join(tables))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
