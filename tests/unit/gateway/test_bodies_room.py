"""Bodies that are read at once share one room: what does not fit is told to come back, nothing stays held."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway import bodies
from scheduler.contracts import errors
from tests.unit.gateway import harness
from tests.unit.gateway.asking import http

MIB = 1024 * 1024
CHAT = "/v1/chat/completions"


@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400_000), st.booleans())))
def test_the_room_is_never_overfull_and_all_of_it_comes_back(
    pieces: list[tuple[int, int, bool]],
) -> None:
    room = bodies.Bodies(MIB)
    parts = [room.reading() for _ in range(6)]
    sizes = [0] * 6
    for which, more, whole in pieces:
        if whole:
            parts[which].__exit__(None, None, None)
            sizes[which] = 0
            continue
        with contextlib.suppress(errors.Busy):
            assert parts[which].hold(sizes[which] + more) >= sizes[which] + more
            sizes[which] += more
        assert sum(sizes) <= room.held <= MIB
    for part in parts:
        part.__exit__(None, None, None)
    assert room.held == 0


@contextlib.asynccontextmanager
async def begun(
    served: harness.Served, path: str, size: int, *, chunked: bool
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]]:
    """Send the first half of a body; what is left is returned."""
    host, _, port = served.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(harness.chat_body(user="x" * size)).encode()
    half = len(body) // 2
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n"
    head += "content-type: application/json\r\n"
    head += (
        "transfer-encoding: chunked\r\n\r\n" if chunked else f"content-length: {len(body)}\r\n\r\n"
    )
    first, rest = body[:half], body[half:]
    if chunked:
        first = b"%x\r\n%b\r\n" % (len(first), first)
        rest = b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest)
    writer.write(head.encode() + first)
    try:
        yield reader, writer, rest
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("chunked", [True, False])
async def test_too_many_large_bodies_at_once_are_told_to_come_back(chunked: bool) -> None:
    """Of six halves of 300 KB, which may come to twice that, a MiB holds one; the others hear 503."""
    async with (
        harness.one_replica(harness.hello, bodies_limit=MIB, body_limit=MIB) as (served, _),
        contextlib.AsyncExitStack() as stack,
    ):
        halves = [
            await stack.enter_async_context(begun(served, CHAT, 600_000, chunked=chunked))
            for _ in range(6)
        ]
        answered = [asyncio.create_task(half[0].readuntil(b"\r\n\r\n")) for half in halves]
        await harness.until(lambda: sum(task.done() for task in answered) == 5)
        refused = [task.result() for task in answered if task.done()]
        for head in refused:
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in head
        (left,) = [n for n, task in enumerate(answered) if not task.done()]
        _, writer, rest = halves[left]
        writer.write(rest)
        assert (await answered[left]).startswith(b"HTTP/1.1 200 ")
        async with http(served) as session:  # and there is room again
            large = harness.chat_body(user="x" * 400_000)
            for _ in range(3):
                assert (await session.post(CHAT, json=large)).status_code == 200
        await served.idle()


async def test_clients_that_leave_in_the_middle_give_the_room_back() -> None:
    async with harness.one_replica(harness.hello, bodies_limit=MIB, body_limit=MIB) as (served, _):
        for _ in range(3):
            async with begun(served, CHAT, 900_000, chunked=False) as (_, writer, _):
                await writer.drain()
        async with http(served) as session:

            async def taken() -> bool:
                body = harness.chat_body(user="x" * 500_000)
                return (await session.post(CHAT, json=body)).status_code == 200

            async with asyncio.timeout(20):
                while not await taken():
                    pass
