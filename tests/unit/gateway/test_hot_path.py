"""The hot routes on a raw connection: pipelines, cuts, odd clients, and the same answers as uvicorn's own."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import protocol
from scheduler.contracts import usage
from tests.unit.gateway import harness

CHAT = "/v1/chat/completions"


class Wire:
    """A client that speaks HTTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read a response's head."""
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)
        first, *lines = raw.decode("latin-1").strip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read a response."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
            return status, headers, body
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, await self.reader.read()

    async def closed(self) -> bool:
        """Whether the gateway closes the connection now, and says nothing more."""
        return await asyncio.wait_for(self.reader.read(), 20) == b""


@contextlib.asynccontextmanager
async def wire(served: harness.Served) -> AsyncIterator[Wire]:
    host, port = served.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post(
    *more: str, key: str = "ann", version: str = "1.1", path: str = CHAT, **changes: object
) -> bytes:
    body = json.dumps(harness.chat_body(**changes)).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: gateway",
        f"Authorization: Bearer {key}",
        *more,
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(body: bytes, sizes: list[int]) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n"
    out = head.encode() + b"transfer-encoding: chunked\r\n\r\n"
    at = 0
    for size in [*sizes, len(body)]:
        if part := body[at : at + size]:
            out += b"%x\r\n%b\r\n" % (len(part), part)
        at += size
    return out + b"0\r\n\r\n"


async def test_a_pipeline_is_answered_in_its_order_hot_and_cold() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), wire(served) as client:
        health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n\r\n"
        client.send(post() + health + post(stream=True) + models + post(key="nobody") + health)
        found = [await client.answer() for _ in range(6)]
        assert [status for status, _, _ in found] == [200, 200, 200, 200, 401, 200]
        assert b"Hello world" in found[0][2]
        assert json.loads(found[1][2]) == {"status": "ok"}
        assert found[2][2].endswith(b"data: [DONE]\n\n")
        assert b'"object":"list"' in found[3][2]
        assert found[4][1]["www-authenticate"] == "Bearer"
        assert len(fake.received) == 2
        await served.idle()


async def test_more_than_may_be_read_ahead_is_answered_too() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), wire(served) as client:
        client.send(post() * 60)
        for _ in range(60):
            assert (await client.answer())[0] == 200
        assert len(fake.received) == 60


@pytest.mark.parametrize("seed", range(4))
async def test_the_answer_does_not_depend_on_how_the_bytes_are_cut(seed: int) -> None:
    draw = random.Random(seed)
    body = json.dumps(harness.chat_body(user="ä" * 300)).encode()
    sent = post(stream=True) + chunked(body, [draw.randint(1, 90) for _ in range(5)]) + post()
    cuts = sorted(draw.sample(range(1, len(sent)), 40))
    async with harness.one_replica(harness.hello) as (served, fake), wire(served) as client:
        for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            client.send(sent[begin:end])
            await client.writer.drain()
            await asyncio.sleep(0)
        found = [await client.answer() for _ in range(3)]
        assert [status for status, _, _ in found] == [200, 200, 200]
        assert fake.received[1].body == json.loads(body)


async def test_heads_of_answers() -> None:
    async with harness.one_replica(harness.hello) as (served, _), wire(served) as client:
        client.send(post())
        status, headers, body = await client.answer()
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert headers["content-length"] == str(len(body))
        assert headers["x-forebay-request-id"] == served.closed()[0].identity.request_id
        assert "date" in headers
        client.send(post(stream=True))
        _, headers, _ = await client.answer()
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["cache-control"] == "no-cache"
        assert headers["x-forebay-request-id"] == served.closed()[1].identity.request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_close_and_http_1_0(stream: bool) -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        async with wire(served) as client:
            client.send(post("Connection: close", stream=stream))
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await client.closed()
        async with wire(served) as client:
            client.send(post(version="1.0", stream=stream))
            status, headers, body = await client.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert "transfer-encoding" not in headers
            assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")
            assert await client.closed()


async def test_expect_100_continue() -> None:
    request = post("Expect: 100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    async with harness.one_replica(harness.hello) as (served, fake):
        async with wire(served) as client:
            client.send(head + b"\r\n\r\n")
            assert (await client.head())[0] == 100
            client.send(body)
            assert (await client.answer())[0] == 200
        async with wire(served) as client:  # refused before it is sent: nothing is asked for
            client.send(head.replace(b"ann", b"nobody") + b"\r\n\r\n")
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (401, "close")
            assert await client.closed()
        assert len(fake.received) == 1


async def test_other_methods_and_spellings_of_the_path() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), wire(served) as client:
        for method in ("GET", "PUT", "OPTIONS", "DELETE"):
            head = f"{method} {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n\r\n"
            client.send(head.encode())
            assert (await client.answer())[0] == 405
        client.send(
            f"HEAD {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n\r\n".encode()
        )
        assert (await client.head())[0] == 405
        for path in (CHAT + "?a=b", "/v1/chat%2Fcompletions", "/v1/%63hat/completions"):
            client.send(post(path=path))
            assert (await client.answer())[0] == 200
        client.send(post(path=CHAT + "/"))
        assert (await client.answer())[0] in (307, 404)
        assert len(fake.received) == 3


async def test_an_offered_upgrade_is_not_made_and_the_request_is_served() -> None:
    """Java's HTTP client offers HTTP/2 with every first request; its body was lost on the way."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    async with harness.one_replica(harness.hello) as (served, _), wire(served) as client:
        client.send(post(*offer) * 200)
        for _ in range(200):
            assert (await client.answer())[0] == 200
        for byte in post(*offer):
            client.send(bytes([byte]))
            await client.writer.drain()
        assert (await client.answer())[0] == 200
        client.send(b"CONNECT gateway:80 HTTP/1.1\r\nhost: gateway\r\n\r\n")
        assert (await client.answer())[0] == 400
        assert await client.closed()


async def test_a_body_of_an_unknown_sender_is_not_kept() -> None:
    """The sender is judged by the head alone, and what follows the refusal is thrown away."""
    async with harness.one_replica(harness.hello) as (served, _), wire(served) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer nobody\r\n"
        client.send(f"{head}content-length: 3000000\r\n\r\n".encode())
        assert (await client.answer())[0] == 401
        for _ in range(30):
            client.send(b"x" * 100_000)
            await client.writer.drain()
        client.send(post())
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("how", ["half", "whole"])
async def test_leaving_in_a_pipeline_ends_the_request_under_way_g2(how: str) -> None:
    """G2: the request under way hears that its client left, though another one was sent behind it."""
    async with harness.one_replica(harness.hang) as (served, fake):
        async with wire(served) as client:
            client.send(post() + post())
            await harness.until(lambda: fake.running > 0)
            if how == "half":
                client.writer.write_eof()
            else:
                client.writer.close()
            async with asyncio.timeout(10):
                await fake.ended.wait()
        rows = await served.rows(1)
        assert [row.outcome for row in rows] == [usage.Outcome.CLIENT_GONE]
        assert len(fake.received) == 1
        await served.idle()


async def test_leaving_while_the_body_is_read_leaves_nothing_behind() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        async with wire(served) as client:
            client.send(post()[:-5])
        async with wire(served) as client:
            client.send(post())
            assert (await client.answer())[0] == 200
        assert len(fake.received) == 1
        assert len(served.closed()) == 1


async def test_a_connection_that_rests_is_closed_and_one_that_works_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "SWEEP_S", 0.02)
    release = asyncio.Event()

    async def slow(received: harness.Received, out: harness.Out) -> None:
        await release.wait()
        await harness.hello(received, out)

    soon: dict[str, Any] = {"head_timeout_s": 0.05, "idle_timeout_s": 0.05}
    async with harness.one_replica(slow, **soon) as (served, fake), wire(served) as client:
        client.send(
            post() + b"GET /hea"
        )  # the next head does not come: no reason to cut this answer
        await harness.until(lambda: fake.running > 0)
        await asyncio.sleep(0.2)
        release.set()
        assert (await client.answer())[0] == 200
        assert (await client.answer())[0] == 408
        assert await client.closed()


async def test_rubbish_is_refused_and_never_hangs() -> None:
    draw = random.Random(7)
    good = post()
    async with harness.one_replica(harness.hello) as (served, _):
        for _ in range(60):
            bad = bytearray(good)
            for at in draw.sample(range(len(good) - 90), 3):
                bad[at] = draw.randrange(256)
            async with wire(served) as client:
                client.send(bytes(bad))
                client.writer.write_eof()
                await asyncio.wait_for(client.reader.read(), 20)
        async with wire(served) as client:
            client.send(good)
            assert (await client.answer())[0] == 200
        await served.idle()


@pytest.mark.parametrize("size", [60_000, 70_000, 100_000, 1_000_000])
async def test_leaving_is_noticed_behind_a_body_of_any_size(size: int) -> None:
    """G2: a body that was whole before it was asked for had stopped the reading for good."""
    body = json.dumps(
        harness.chat_body(messages=[{"role": "user", "content": "x" * size}])
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann\r\n"
    async with harness.one_replica(harness.hang) as (served, fake):
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.http.rsplit(":", 1)[1]))
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await harness.until(lambda: fake.running == 1)
        writer.close()
        await harness.until(lambda: not fake.running)


@pytest.mark.parametrize("request_line", [f"POST {CHAT}", "GET /v1/models"])
async def test_a_pipeline_of_thousands_is_ended_and_not_kept(request_line: str) -> None:
    one = f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    async with harness.one_replica(harness.hello) as (served, _):
        where = ("127.0.0.1", int(served.http.rsplit(":", 1)[1]))
        reader, writer = await asyncio.open_connection(*where)
        writer.write(one * 2_000)
        got = b""
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(65_536), 20):
                got += part
        writer.close()
        assert got.count(b"HTTP/1.1 401") < 2_000  # ended, not worked off
