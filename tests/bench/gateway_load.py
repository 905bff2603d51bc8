"""The load generator of the gateway bench: reads one JSON order a line, answers one JSON line.

Orders: ``{"do": "serial"|"closed"|"streams", "address": "host:port", "headers": {…}, "pid": router}``
with ``requests``, ``connections``, ``window_s``. It reads the router's CPU time itself, right before and
right after what it measures. Bodies are 2 KB chats: one of eight system prompts, then a text that never
comes again.
"""

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import httptools
import uvloop

from tests.bench import processes

_EVENT = b"data: {"
_PATIENCE_S = 20.0  # for an answer that was asked for before the limit; then it has failed
_WORDS = ("water ", "pool ", "gate ", "level ", "flow ", "head ", "turbine ", "spill ", "intake ")


def _text(seed: int, size: int) -> str:
    draw = random.Random(seed)
    text = ""
    while len(text) < size:
        text += draw.choice(_WORDS)
    return text[:size]


_SYSTEMS = [_text(seed, 1200) for seed in range(8)]
_TALE = _text(99, 620)


def bodies(stream_tokens: int = 0) -> Iterator[bytes]:
    """Yield chat bodies of about 2 KB, each with a text of its own."""
    for number in itertools.count(time.time_ns()):
        user = f"Question {number}: {_TALE}"
        body: dict[str, Any] = {
            "model": "chat",
            "messages": [
                {"role": "system", "content": _SYSTEMS[number % 8]},
                {"role": "user", "content": user},
            ],
            "max_tokens": stream_tokens or 8,
            "temperature": 0.0,
        }
        if stream_tokens:
            body["stream"] = True
        yield json.dumps(body).encode()


class Client(asyncio.Protocol):
    """One connection: sends a request, counts what comes."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.events = 0
        self.first = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvloop's
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(0)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        seen = self._tail + body
        self.events += seen.count(_EVENT)
        self._tail = seen[-(len(_EVENT) - 1) :]
        if self.events and not self.first.done():
            self.first.set_result(None)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        if not self.done.done():
            self.done.set_result(status)

    def send(self, body: bytes) -> "asyncio.Future[int]":
        assert self._transport is not None
        self.done = asyncio.get_running_loop().create_future()
        self._transport.write(self._head % len(body) + body)
        return self.done

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()


async def connect(order: dict[str, Any]) -> Client:
    host, port = order["address"].split(":")
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {order['address']}",
        "content-type: application/json",
        "accept: application/json",
        "user-agent: bench",
        *(f"{name}: {value}" for name, value in order.get("headers", {}).items()),
        "content-length: %d\r\n\r\n",
    ]
    head = "\r\n".join(lines).encode()
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(head), host, int(port))
    return client


def _cpu(order: dict[str, Any]) -> float:
    return processes.cpu_s(order["pid"]) if order.get("pid") else 0.0


async def closed(order: dict[str, Any]) -> dict[str, Any]:
    """Keep ``connections`` requests under way until ``requests`` are done or ``limit_s`` is over."""
    clients = [await connect(order) for _ in range(order["connections"])]
    texts, tickets = bodies(), iter(range(order["requests"]))
    latencies: list[float] = []
    bad = 0
    until = time.perf_counter() + order.get("limit_s", 600.0)

    async def work(client: Client) -> None:
        nonlocal bad
        for _ in tickets:
            began = time.perf_counter()
            status = await client.send(next(texts))
            ended = time.perf_counter()
            latencies.append(ended - began)
            bad += status != 200
            if ended > until or status == 0:
                return

    cpu, began = _cpu(order), time.perf_counter()
    limit_s = order.get("limit_s", 600.0) + _PATIENCE_S
    tasks = [asyncio.ensure_future(work(client)) for client in clients]
    _, silent = await asyncio.wait(tasks, timeout=limit_s)
    for task in silent:
        task.cancel()
    bad += len(silent)
    latencies += [limit_s] * len(silent)
    seconds, cpu = time.perf_counter() - began, _cpu(order) - cpu
    for client in clients:
        client.close()
    latencies.sort()
    count = len(latencies)
    return {
        "requests": count,
        "bad": bad,
        "requests_per_s": count / seconds,
        "cpu_us_per_request": cpu / count * 1e6,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[min(count - 1, int(count * 0.99))] * 1e3,
    }


async def streams(order: dict[str, Any]) -> dict[str, Any]:
    """Open ``connections`` endless streams, then count tokens and CPU for ``window_s``."""
    clients = [await connect(order) for _ in range(order["connections"])]
    texts = bodies(stream_tokens=100_000)
    for client in clients:
        client.send(next(texts))
        await asyncio.sleep(0.02 / order["connections"])  # spread over one token's time
    await asyncio.wait([client.first for client in clients], timeout=order.get("limit_s", 30.0))
    await asyncio.sleep(0.5)
    began, cpu, seen = time.perf_counter(), _cpu(order), sum(c.events for c in clients)
    await asyncio.sleep(order["window_s"])
    seconds = time.perf_counter() - began
    cpu, tokens = _cpu(order) - cpu, sum(c.events for c in clients) - seen
    bad = sum(client.done.done() or not client.first.done() for client in clients)
    for client in clients:
        client.close()
    await asyncio.sleep(0.2)
    return {
        "bad": bad,
        "tokens_per_s": tokens / seconds,
        "cpu_us_per_token": cpu / max(1, tokens) * 1e6,
    }


async def main() -> None:
    """Do what each line says."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        body = streams if order["do"] == "streams" else closed
        try:
            said = await body(order)
        except OSError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
