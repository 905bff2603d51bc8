"""A whole gateway process: memory over many cancelled streams, clients that ping, SIGTERM."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forebay import lifeline
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.unit.gateway import harness

ANN = (("authorization", "Bearer ann"),)
ROOT = Path(__file__).parents[2]
AT_ONCE, WARM_UP = 32, 640
MOST_BYTES = 1024  # that a cancelled stream may leave behind: 20 MB after 20,000


class Process:
    """A running gateway process."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: dict[str, str]) -> None:
        self.process = process
        self.grpc, self.http = addresses["grpc"], addresses["http"]
        self.counts: dict[str, int] = {}

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    async def end(self) -> None:
        """Send SIGTERM; its counts are known afterwards."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(self.process.communicate(), 30)
        self.counts = json.loads(out)


@contextlib.asynccontextmanager
async def process(fake: harness.FakeReplica, tmp: Path, **settings: Any) -> AsyncIterator[Process]:
    replica = fake.replica(tmp)
    settings = {"connect_timeout_s": 30.0, **settings}  # on a busy machine nobody is lost
    told = {"address": fake.address, "secret_file": replica.secret_file, "settings": settings}
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.gateway_process",
        json.dumps(told),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        line = await asyncio.wait_for(started.stdout.readline(), 30)
        yield Process(started, json.loads(line))
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


def ask() -> forebay_pb2.GenerateRequest:
    message = forebay_pb2.Message(role="user", content="hi")
    return forebay_pb2.GenerateRequest(model="chat", max_tokens=8, messages=[message])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("streams", [4_000, pytest.param(20_000, marks=pytest.mark.long)])
async def test_cancelled_streams_leave_no_memory_behind_g14(tmp_path: Path, streams: int) -> None:
    """Case G14: growth below 20 MB after 20,000, every load given back, one row for each.

    A fifth of them, with a fifth of the bound, finds what each stream leaves behind as well.
    """
    async with (
        harness.FakeReplica(harness.hang).listening() as fake,
        process(fake, tmp_path) as gateway,
        grpc.aio.insecure_channel(gateway.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        api: Any = forebay_pb2_grpc.InferenceStub(channel)

        async def cancel(count: int) -> None:
            for _ in range(count):
                call = api.Generate(ask(), metadata=ANN)
                assert (await call.read()).text == "a"
                call.cancel()

        async def many(count: int) -> None:
            await asyncio.gather(*[cancel(count // AT_ONCE) for _ in range(AT_ONCE)])

        await many(WARM_UP)
        before = gateway.resident_bytes()
        await many(streams)
        await harness.until(lambda: fake.running == 0)
        assert gateway.resident_bytes() - before < streams * MOST_BYTES
        await gateway.end()
        total = WARM_UP + streams
        assert gateway.counts == {"open open": total, "close client_gone": total}


async def test_sigterm_lets_running_answers_end(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(received: harness.Received, out: harness.Out) -> None:
        await out.send(harness.data(harness.chat_event({"content": "a"}), 1))
        await release.wait()
        await out.send(harness.data(harness.chat_event({}, "stop"), 2), harness.DONE)
        await out.finish(output=2)

    async with (
        harness.FakeReplica(script).listening() as fake,
        process(fake, tmp_path, drain_s=20) as gateway,
        grpc.aio.insecure_channel(gateway.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        api: Any = forebay_pb2_grpc.InferenceStub(channel)
        call = api.Generate(ask(), metadata=ANN)
        assert (await call.read()).text == "a"
        ending = asyncio.create_task(gateway.end())
        probe, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        while (await probe.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING:
            pass  # SIGTERM has not arrived yet
        assert await api.Generate(ask(), metadata=ANN).code() is grpc.StatusCode.UNAVAILABLE
        release.set()
        assert (await call.read()).finish_reason == "stop"
        assert (await call.read()).usage.completion_tokens == 2
        assert await call.read() is grpc.aio.EOF
        await ending
        assert gateway.process.returncode == 0
        assert gateway.counts["close ok"] == 1


STALLED = 1_000
FLOOD_BYTES = 2 * 2**20  # what each replica's stream would send, if anybody read it


@pytest.mark.slow
async def test_1000_clients_that_read_nothing_hold_bounded_memory(tmp_path: Path) -> None:
    """Backpressure reaches the replica: what it sends is not collected here, two gigabytes in all."""
    lifeline.open_files()
    sent: dict[int, int] = {}

    async def floods(received: harness.Received, out: harness.Out) -> None:
        number = received.body["seed"]
        out.hold_little()
        frame = harness.data(harness.chat_event({"content": "x" * 8_000}), 1)
        sent[number] = 0
        while sent[number] < FLOOD_BYTES and not out.left.done():
            await out.send(frame)
            sent[number] += len(frame.payload)
        await out.gone()

    async with (
        harness.FakeReplica(floods).listening() as fake,
        process(
            fake, tmp_path, client_stall_s=600.0, stream_idle_s=600.0, replica_seats=STALLED
        ) as gateway,
    ):
        host, port = gateway.http.split(":")
        before = gateway.resident_bytes()
        clients = []
        for number in range(STALLED):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
            body = json.dumps(harness.chat_body(stream=True, seed=number)).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n"
            request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            await asyncio.get_running_loop().sock_sendall(raw, request)
            clients.append(raw)
        await harness.until(lambda: len(sent) == STALLED, 60)
        # Nothing moves any more: every replica's stream waits for its client.
        last = -1
        while last != (last := sum(sent.values())):  # noqa: ASYNC110 - nothing happens: no event
            await asyncio.sleep(1)
        assert all(count < FLOOD_BYTES for count in sent.values())
        grown = gateway.resident_bytes() - before
        assert grown < STALLED * 400_000, f"{grown / STALLED:.0f} bytes a client"
        for raw in clients:
            raw.close()
        await harness.until(lambda: fake.running == 0, 60)
        await gateway.end()
        assert gateway.counts["close client_gone"] == STALLED
