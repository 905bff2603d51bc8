"""What a connection may cost before its request is known."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway import protocol
from tests.unit.gateway import fleets, harness

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(served: harness.Served) -> AsyncIterator[Connection]:
    host, port = served.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def flooded(connection: Connection, begin: bytes, piece: bytes) -> bytes:
    """Send ``begin``, then pieces until the gateway has had enough; return what it says."""
    reader, writer = connection
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        writer.write(begin)
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            if answer.done():
                break
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(answer, 20)
    return b"reset"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"a" * 32_000),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x: a\r\n" * 5_000),
        (b"GET /health?", b"a" * 32_000),
        (
            b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
            b"a" * 32_000,
        ),
    ],
    ids=["a header", "many headers", "the path", "a trailer"],
)
async def test_a_head_without_end_is_cut_off(begin: bytes, piece: bytes) -> None:
    async with (
        harness.gateway(fleets.make_view([])) as served,
        connected(served) as connection,
    ):
        said = await flooded(connection, begin, piece)
        # A kernel may throw the last words away with what was not read.
        assert b" 431 " in said or said == b"reset"


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async with harness.gateway(fleets.make_view([]), head_timeout_s=0.05) as served:
        for begin, says in ((b"", b""), (b"GET /health HT", b"HTTP/1.1 408 ")):
            async with connected(served) as (reader, writer):
                writer.write(begin)
                said = await asyncio.wait_for(reader.read(), 20)
                assert said.startswith(says)
                assert bool(said) is bool(says)


class _Odd:
    """A connection that notes when it is looked at, or can't be."""

    def __init__(self, seen: list[str], name: str, *, odd: bool) -> None:
        self.transport = self
        self._seen, self._name, self._odd = seen, name, odd

    def rest(self, now: float) -> None:
        if self._odd:
            raise AttributeError("a fault of ours")
        self._seen.append(self._name)

    def abort(self) -> None:
        self._seen.append(f"{self._name} aborted")


async def test_a_fault_in_one_connection_ends_that_one_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "SWEEP_S", 0.0)
    seen: list[str] = []
    connections = [_Odd(seen, "odd", odd=True), _Odd(seen, "even", odd=False)]
    sweeping = asyncio.create_task(protocol.sweep(connections))
    await harness.until(lambda: len(seen) >= 4)
    sweeping.cancel()
    assert seen[:4] == ["odd aborted", "even"] * 2
    assert "a fault of ours" in caplog.text


async def test_large_bodies_in_odd_chunks_pass() -> None:
    body = b'{"model": "chat", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}'

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000
        for letter in body:
            yield bytes([letter])

    async with (
        harness.one_replica(harness.hello) as (served, _),
        httpx.AsyncClient(
            base_url=served.http, headers=harness.ANN_AUTH, trust_env=False, verify=False
        ) as session,
    ):
        for _ in range(2):
            answer = await session.post(
                "/v1/chat/completions",
                content=pieces(),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 200, answer.text
