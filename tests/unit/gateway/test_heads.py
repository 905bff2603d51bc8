"""HTTP/1.1 as RFC 9112 has it, hostile clients included: what is answered, and what is never written."""

import asyncio
import json
from typing import Any

import pytest

from gateway import heads, protocol, settings
from scheduler.contracts import errors
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.test_protocol import connected

AUTH = b"host: x\r\nauthorization: Bearer ann\r\n"
WHOLE = json.dumps(harness.chat_body()).encode()
STREAM = json.dumps(harness.chat_body(stream=True)).encode()
CHAT = b"/v1/chat/completions"


def get(target: bytes, headers: bytes = AUTH, version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET %b %b\r\n%b\r\n" % (target, version, headers)


def post(body: bytes = WHOLE, more: bytes = b"", target: bytes = CHAT) -> bytes:
    head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
    return head % (target, AUTH, len(body), more) + body


CLOSE = b"connection: close\r\n"
CODED = b"transfer-encoding: %b\r\n"
SAYS: dict[str, tuple[bytes, int]] = {
    "absolute form": (get(b"http://any.host:1/v1/models", AUTH + CLOSE), 200),
    "absolute form of a hot route": (post(target=b"HTTP://h/v1/chat/completions", more=CLOSE), 200),
    "absolute form without a path": (get(b"http://h", AUTH + CLOSE), 404),
    "another scheme": (get(b"ftp://h/v1/models"), 400),
    "a user in the target": (get(b"http://a@h/v1/models"), 400),
    "a fragment": (get(b"/v1/models#a"), 400),
    "a fragment on a hot route": (post(target=CHAT + b"#a"), 400),
    "asterisk": (get(b"*"), 400),
    "no host": (get(b"/health", b""), 400),
    "two hosts": (get(b"/health", b"host: a\r\nhost: b\r\n"), 400),
    "another coding": (get(b"/health", AUTH + CODED % b"gzip, chunked"), 501),
    "a coding and a length": (post(more=CODED % b"chunked"), 400),
    "a coding in HTTP/1.0": (get(b"/health", AUTH + CODED % b"chunked", b"HTTP/1.0"), 400),
    "an encoded body": (post(more=b"content-encoding: gzip\r\n"), 415),
    "HTTP/2.0": (get(b"/health", version=b"HTTP/2.0"), 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x00\xa5\x01\x00\x00", 400),
    "a folded header": (get(b"/health", AUTH + b"x: a\r\n b\r\n"), 400),
    "a large head at once": (post(more=b"x: %b\r\n" % (b"a" * 70_000)), 431),
    "many headers at once": (post(more=b"x: a\r\n" * 12_000), 431),
    "a large head that fits": (post(more=b"x: %b\r\n" % (b"a" * 60_000) + CLOSE), 200),
    "a small head and a large body": (post(WHOLE + b" " * 200_000, more=CLOSE), 200),
    "no such path": (get(b"/nope", AUTH + CLOSE), 404),
    "no such method": (b"DELETE /v1/models HTTP/1.1\r\n" + AUTH + CLOSE + b"\r\n", 405),
    "a preflight": (b"OPTIONS /v1/models HTTP/1.1\r\n" + AUTH + CLOSE + b"\r\n", 405),
    "no key": (get(b"/v1/models", b"host: x\r\n" + CLOSE), 401),
}


@pytest.fixture(scope="module")
def said() -> dict[str, bytes]:
    """Return what the gateway answers to each, until it closes."""

    async def ask() -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        async with harness.one_replica(harness.hello) as (served, _):
            for name, (sent, _) in SAYS.items():
                async with connected(served) as (reader, writer):
                    writer.write(sent)
                    found[name] = await asyncio.wait_for(reader.read(), 20)
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("name", SAYS)
def test_heads(said: dict[str, bytes], name: str) -> None:
    head, _, body = said[name].partition(b"\r\n\r\n")
    status = SAYS[name][1]
    assert head.startswith(b"HTTP/1.1 %d " % status), said[name]
    assert b"\r\nx-forebay-request-id: " in head
    assert b"\r\nconnection: close" in head
    if status != 200:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_head_is_get_without_a_body() -> None:
    async with (
        harness.gateway(fleets.make_view([])) as served,
        connected(served) as (reader, writer),
    ):
        writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"NONSENSE\x00\r\n\r\n",
        b"GET /health#a HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 600_000,
    ],
    ids=["no HTTP", "a bad head", "a head without end"],
)
@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_rubbish_behind_a_request_is_never_answered_into_its_answer(
    rubbish: bytes, body: bytes
) -> None:
    go = asyncio.Event()

    async def later(received: harness.Received, out: harness.Out) -> None:
        await go.wait()
        await harness.hello(received, out)

    async with harness.one_replica(later) as (served, fake), connected(served) as (reader, writer):
        writer.write(post(body) + rubbish)
        await harness.until(lambda: bool(fake.received))
        go.set()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if body is STREAM else b"}")


async def test_rubbish_in_the_body_of_a_pipelined_request_ends_the_connection_after_the_first() -> (
    None
):
    bad = b"POST %b HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\nxyz\r\n" % (CHAT, AUTH)
    async with (
        harness.one_replica(harness.hello) as (served, _),
        connected(served) as (reader, writer),
    ):
        writer.write(post(STREAM) + bad)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("target", [CHAT, b"/v1/models"], ids=["hot", "application"])
@pytest.mark.parametrize("pieces", [0, 1000], ids=["nothing comes", "a byte now and then"])
async def test_a_body_that_does_not_end_is_refused_and_frees_its_place(
    target: bytes, pieces: int
) -> None:
    head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"
    async with (
        harness.one_replica(harness.hello, body_timeout_s=0.1) as (served, _),
        connected(served) as (reader, writer),
    ):
        writer.write(head % (target, AUTH))
        answer = asyncio.create_task(reader.read())
        for _ in range(pieces):
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.01)
            if answer.done():
                break
        said = await asyncio.wait_for(answer, 20)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nconnection: close" in said
        assert b'"body_late"' in said


async def test_a_body_that_we_do_not_read_yet_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request of a pipeline waits for us, not we for it."""
    go = asyncio.Event()
    rest = protocol.Protocol.rest
    held, passed_s, looks = False, 0.0, 0

    def looking(connection: protocol.Protocol, now: float) -> None:
        """Let five seconds pass between two looks while the body is not read."""
        nonlocal passed_s, looks
        looks += 1
        passed_s += 5.0 * held
        rest(connection, now + passed_s)

    monkeypatch.setattr(protocol, "SWEEP_S", 0.02)
    monkeypatch.setattr(protocol.Protocol, "rest", looking)

    async def later(received: harness.Received, out: harness.Out) -> None:
        await go.wait()
        await harness.hello(received, out)

    async with (
        harness.one_replica(later, body_timeout_s=30.0) as (served, fake),
        connected(served) as (reader, writer),
    ):
        second = post(more=b"expect: 100-continue\r\nconnection: close\r\n")
        writer.write(post() + second[: -len(WHOLE)])
        await harness.until(lambda: bool(fake.received))
        held = True
        await harness.until(lambda: passed_s > 90.0)  # three times the limit
        held = False
        go.set()
        await asyncio.wait_for(reader.readuntil(b" 100 Continue\r\n\r\n"), 20)
        before = looks
        await harness.until(lambda: looks > before + 1)  # now it is waited for
        writer.write(WHOLE)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("limit", ["connections", "connections_per_peer"])
async def test_connections_are_bounded(limit: str) -> None:
    bound: dict[str, Any] = {limit: 2}
    async with harness.gateway(fleets.make_view([]), **bound) as served:
        async with connected(served), connected(served), connected(served) as (reader, _):
            said = await asyncio.wait_for(reader.read(), 20)
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1" in said
        async with connected(served) as (reader, writer):
            for _ in range(100):  # the server hears a moment later that they have gone
                writer.write(get(b"/health", b"host: x\r\n"))
                if (await reader.read(100)).startswith(b"HTTP/1.1 200 "):
                    break
            else:
                raise AssertionError("no room although all have left")


def test_peers_are_forgotten() -> None:
    doors = heads.Doors(settings.GatewaySettings(connections_per_peer=1))
    assert doors.enter(("a", 1)) is None
    assert isinstance(doors.enter(("a", 2)), errors.Busy)
    assert doors.enter(("b", 1)) is None
    for peer in (("a", 1), ("a", 2), ("b", 1)):
        doors.leave(peer)
    assert not doors._peers
    assert doors.enter(("a", 3)) is None
