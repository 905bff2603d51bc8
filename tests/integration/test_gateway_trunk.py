"""Gateway and replica with a trunk between them: the same answers, clients that are behind, and its end."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette import types

from engines.replica import app, engine, server
from scheduler.contracts import usage
from tests.unit.engines import asgi, scripted
from tests.unit.gateway import fleets, harness

CHAT = "/v1/chat/completions"
TOKENS = 40


def event(text: str, finish: str | None = None) -> bytes:
    return harness.chat_event({"content": text}, finish)


async def counts(inner: scripted.Scripted, key: str, tap: engine.Tap, send: types.Send) -> None:
    """Stream the numbers up to `TOKENS`, as many streams in turn as there are."""
    tap.prompt([1, 2])
    tap.prefilled(2)
    await scripted.begin(send)
    for number in range(TOKENS):
        tap.emitted(0, [number])
        await scripted.part(send, event(f"{number},"))
        await asyncio.sleep(0)
    tap.finished(0, "stop")
    await scripted.part(send, event("", "stop"))
    await scripted.part(send, b"data: [DONE]\n\n", more=False)


@contextlib.asynccontextmanager
async def site(
    tmp: Path, script: scripted.Script
) -> AsyncIterator[tuple[harness.Served, scripted.Scripted, app.Replica, httpx.AsyncClient]]:
    """Serve one replica with an open trunk, and a client of its gateway."""
    inner, stack = scripted.build(script, usage.MemorySink(), seats=64)
    assert isinstance(stack, app.Replica)
    secret = tmp / "secret"
    secret.write_text(asgi.SECRET)
    async with server.listening(stack, "127.0.0.1") as (address, _):
        one = fleets.make_replica("r1", address=address, secret_file=str(secret), seats=64)
        async with (
            harness.gateway(fleets.make_view([one])) as served,
            httpx.AsyncClient(
                base_url=served.http, headers=harness.ANN_AUTH, trust_env=False, timeout=30
            ) as client,
        ):
            inner.script = counts
            await client.post(CHAT, json=harness.chat_body(stream=True))
            await harness.until(lambda: bool(stack._trunks._open))
            await asyncio.sleep(0.05)  # the gateway has its head as well
            inner.script = script
            yield served, inner, stack, client


def text(body: str) -> str:
    """Return a whole stream's text."""
    assert body.endswith("data: [DONE]\n\n"), body[-200:]
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events)


async def test_many_streams_come_whole_over_one_trunk(tmp_path: Path) -> None:
    async with site(tmp_path, counts) as (served, _, stack, client):
        (trunk,) = stack._trunks._open.values()
        records = 0
        put = trunk.put

        async def counting(number: int, body: bytes) -> None:
            nonlocal records
            records += 1
            await put(number, body)

        trunk.put = counting  # type: ignore[method-assign]  # to see that it is used
        found = await asyncio.gather(
            *(client.post(CHAT, json=harness.chat_body(stream=True)) for _ in range(30))
        )
        assert {text(one.text) for one in found} == {"".join(f"{n}," for n in range(TOKENS))}
        assert records >= 30 * TOKENS / 4
        whole = [row for row in await served.rows(31) if row.outcome == "ok"]
        assert {row.output_tokens for row in whole} == {TOKENS}


async def test_a_client_that_reads_nothing_holds_up_nobody_else(tmp_path: Path) -> None:
    sent: dict[str, int] = {}
    size, wanted = 8_000, 1_000

    async def floods(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prompt([1, 2])
        tap.prefilled(2)
        await scripted.begin(send)
        for number in range(wanted):
            tap.emitted(0, [number])
            await scripted.part(send, event("x" * size))
            sent[key] = number + 1
            await asyncio.sleep(0)
        tap.finished(0, "stop")
        await scripted.part(send, event("", "stop"))
        await scripted.part(send, b"data: [DONE]\n\n", more=False)

    async with site(tmp_path, floods) as (served, inner, _, client):
        body = json.dumps(harness.chat_body(stream=True)).encode()
        host, _, port = served.http.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        await harness.until(lambda: bool(sent))
        (slow,) = sent
        quick = await client.post(CHAT, json=harness.chat_body(stream=True))
        assert text(quick.text) == "x" * size * wanted
        assert sent[slow] < wanted  # what it did not read was not computed either
        inner.script = counts
        assert text((await client.post(CHAT, json=harness.chat_body(stream=True))).text)
        rest = await reader.read(-1)
        assert rest.count(b"x" * size) == wanted
        assert b"data: [DONE]" in rest[-100:]
        writer.close()


async def test_a_client_that_leaves_ends_its_sequence_g2(tmp_path: Path) -> None:
    async with site(tmp_path, scripted.endless) as (served, inner, _, client):
        async with client.stream("POST", CHAT, json=harness.chat_body(stream=True)) as answer:
            async for _ in answer.aiter_bytes():
                break
            assert inner.running
        await harness.until(lambda: not inner.running)
        assert [row.outcome for row in await served.rows(2)][-1] == "client_gone"
        inner.script = counts
        assert text((await client.post(CHAT, json=harness.chat_body(stream=True))).text)


async def test_a_trunk_does_not_keep_its_replica_from_stopping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with site(tmp_path, counts) as (_, _, stack, client):
            assert text((await client.post(CHAT, json=harness.chat_body(stream=True))).text)
            assert stack._trunks._open
    assert not [record for record in caplog.records if "uvicorn" in record.name]
