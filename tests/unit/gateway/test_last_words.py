"""What a client hears at the end of a connection, and how long it may leave it unread."""

import asyncio
import json

import pytest

from gateway import heads, protocol, settings
from scheduler.contracts import errors, usage
from tests.unit.gateway import harness
from tests.unit.gateway.test_hot_path import CHAT, Wire, chunked, post, wire


async def large(received: harness.Received, out: harness.Out) -> None:
    """Answer with 8 MB in one piece."""
    answer = {**harness.whole(received), "padding": "x" * 8_000_000}
    await out.send(harness.PROMPT, harness.data(json.dumps(answer).encode(), 7, 8, 9))
    await out.finish()


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the gateway's end of a connection is gone; it looks at them often."""
    told = asyncio.Event()
    really = protocol.Protocol.connection_lost

    def ended(connection: protocol.Protocol, fault: Exception | None) -> None:
        told.set()
        really(connection, fault)

    monkeypatch.setattr(protocol.Protocol, "connection_lost", ended)
    monkeypatch.setattr(protocol, "SWEEP_S", 0.02)
    return told


GET = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"  # no key is asked for


@pytest.mark.parametrize(
    "asked",
    [post(), post("Connection: close"), GET * 60],
    ids=["kept open", "closed", "the application's"],
)
async def test_who_reads_nothing_of_an_answer_is_given_up(
    asked: bytes, lost: asyncio.Event
) -> None:
    """Such connections were kept for ever, with all that waited for them."""

    async with harness.one_replica(large, client_stall_s=0.1) as (served, _):
        where = served.http.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(where[0], int(where[1]), limit=1024)
        writer.write(asked)
        async with asyncio.timeout(20):
            await lost.wait()
        writer.transport.abort()


async def unread(client: Wire) -> None:
    """Send 3 MB, as one who reads nothing before all is sent."""
    for _ in range(30):
        client.send(b"x" * 100_000)
        await client.writer.drain()


@pytest.mark.parametrize("path", [CHAT, "/v1/files"], ids=["hot", "the application's"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_refusal_is_heard_by_who_sends_all_of_the_body_first(
    path: str, version: str
) -> None:
    """Python's urllib does, with `Connection: close`; it heard of a broken pipe instead."""
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer nobody\r\n"
        "connection: close\r\ncontent-length: 3000000\r\n\r\n"
    )
    async with harness.one_replica(harness.hello) as (served, _), wire(served) as client:
        client.send(head.encode())
        await unread(client)
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert b"invalid_api_key" in body
        assert await client.closed()


async def test_who_never_sends_the_rest_of_a_refused_body_is_not_waited_for(
    lost: asyncio.Event,
) -> None:

    head = post("Connection: close", key="nobody")[:-20]
    async with (
        harness.one_replica(harness.hello, body_timeout_s=0.1) as (served, _),
        wire(served) as client,
    ):
        client.send(head)
        assert (await client.answer())[0] == 401
        async with asyncio.timeout(20):
            await lost.wait()


async def test_what_comes_behind_the_last_request_is_not_begun() -> None:
    async with harness.one_replica(harness.hello) as (served, fake), wire(served) as client:
        client.send(post("Connection: close") + post("Expect: 100-continue")[:-5])
        assert (await client.answer())[0] == 200
        assert await client.closed()
        assert len(fake.received) == 1


async def test_http_1_0_is_asked_for_no_body() -> None:
    """It would take "100 Continue" for the answer."""
    for path in (CHAT, "/v1/models"):
        asked = post("Expect: 100-continue", version="1.0", path=path)[:-5]
        async with (
            harness.one_replica(harness.hello, body_timeout_s=0.1) as (served, _),
            wire(served) as client,
        ):
            client.send(asked)
            assert (await client.head())[0] == 408


async def test_trailers_are_no_headers() -> None:
    """What a proxy in front takes out of heads would come in behind the body."""
    body = json.dumps(harness.chat_body()).encode()
    trailers = b"authorization: Bearer nobody\r\nx-forebay-priority: batch\r\nx-request-id: t\r\n"
    asked = chunked(body, [10])[: -len(b"\r\n")] + trailers + b"\r\n"
    async with harness.one_replica(harness.hello) as (served, _), wire(served) as client:
        for _ in range(2):
            client.send(asked)
            assert (await client.answer())[0] == 200
        for row in served.closed():
            assert row.outcome is usage.Outcome.OK
            assert row.identity.tier == "interactive"
            assert not row.identity.caller_request_id


def test_a_peer_that_found_no_place_is_not_counted_out() -> None:
    """Each refusal for the process's own bound took one off its address's count."""
    doors = heads.Doors(settings.GatewaySettings(connections=2, connections_per_peer=1))
    assert doors.enter(("a", 1)) is None
    assert doors.enter(("b", 1)) is None
    assert isinstance(doors.enter(("a", 2)), errors.Busy)
    doors.leave(("a", 2))
    doors.leave(("b", 1))
    assert isinstance(doors.enter(("a", 3)), errors.Busy)
    for peer in (("a", 1), ("a", 3)):
        doors.leave(peer)
    assert not doors._peers
    assert doors.enter(("a", 4)) is None
