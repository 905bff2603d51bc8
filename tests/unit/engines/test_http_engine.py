"""The engine over HTTP: bytes cut anywhere, connections that break, usage that nobody asked for."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from engines.http import proxy, upstream
from engines.replica import app, engine, sse, state
from scheduler.contracts import clock, fleet, frames, usage
from tests.unit.engines import asgi

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[Peer, dict[str, Any]], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TEXT = "naïve 漢字 🦀"


def chunk(text: str, reason: str | None = None) -> bytes:
    value = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def external(handler: Handler) -> AsyncIterator[str]:
    """A server that answers probes, and requests as `handler` says; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
                return
            size = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            await handler((reader, writer), json.loads(await reader.readexactly(size)))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@contextlib.asynccontextmanager
async def replica(url: str, sink: usage.MemorySink, **args: Any) -> AsyncIterator[Any]:
    spec = fleet.ReplicaSpec("m", "1", fleet.EngineKind.HTTP, weights=url, engine_args=args)
    time = clock.SystemClock()
    async with proxy.opened(upstream.Options.from_spec(spec), time) as inner:
        about = state.About(replica_id="r-1")
        options = app.Options(asgi.SECRET, fleet.Role.SHARED, 2, 0, about)
        yield app.build(inner, options, sink=sink, time=time)


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection by RST."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


STREAM = {"prompt": "x", "stream": True}


async def test_one_byte_at_a_time_loses_nothing(sink: usage.MemorySink) -> None:
    async def drip(peer: Peer, body: dict[str, Any]) -> None:
        assert body["stream_options"] == {"include_usage": True}
        peer[1].write(OK)
        for byte in b"".join([*map(chunk, TEXT), chunk("", "stop"), USAGE, DONE]):
            peer[1].write(bytes((byte,)))
            await peer[1].drain()

    async with external(drip) as url, replica(url, sink) as served:
        call = await asgi.post(served, asgi.identity(), STREAM)
    assert call.client_bytes == b"".join([*map(chunk, TEXT), chunk("", "stop"), DONE])
    assert (call.end.prompt_tokens, call.end.cached_tokens, call.end.output_tokens) == (7, 2, 3)
    assert call.end.finish_reasons == ("stop",)
    assert call.token_ids() == []
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.uncached_prompt_tokens, row.cached_prompt_tokens) == (5, 2)


async def test_killed_in_the_middle_of_a_character_only_whole_events_passed(
    sink: usage.MemorySink,
) -> None:
    crab = chunk("🦀")

    async def cut(peer: Peer, body: dict[str, Any]) -> None:
        peer[1].write(OK + chunk("naïve") + crab[: crab.index("🦀".encode()) + 2])

    async with external(cut) as url, replica(url, sink) as served:
        call = await asgi.post(served, asgi.identity(), STREAM)
    assert call.client_bytes == chunk("naïve")
    assert call.error.code == "replica_lost"


async def test_one_byte_at_a_time_and_then_cut_in_a_character_g6(sink: usage.MemorySink) -> None:
    """G6: text whole up to the cut; of the cut character nothing; and no ids, so no going on elsewhere."""
    event = chunk("naïve 漢字 🦀")

    async def drip(peer: Peer, body: dict[str, Any]) -> None:
        peer[1].write(OK)
        cut = event[: event.index("🦀".encode()) + 2]
        for byte in event + event + cut:
            peer[1].write(bytes([byte]))
            await peer[1].drain()

    async with external(drip) as url, replica(url, sink) as served:
        call = await asgi.post(served, asgi.identity(), STREAM)
    assert call.client_bytes == event + event
    assert call.error.code == "replica_lost"
    assert not [frame for frame in call.all if frame.kind is frames.Kind.PROMPT or frame.packed]


async def test_a_reset_is_an_error_and_no_made_up_end(sink: usage.MemorySink) -> None:
    async def rst(peer: Peer, body: dict[str, Any]) -> None:
        peer[1].write(OK + chunk("a") + chunk("b"))
        await peer[1].drain()
        await arrived.wait()
        reset(peer[1])

    async with external(rst) as url, replica(url, sink) as served:
        call = asgi.Call()
        arrived = call.arrived
        await asgi.post(served, asgi.identity(), STREAM, call=call)
    assert call.client_bytes == chunk("a") + chunk("b")
    assert b"[DONE]" not in call.body
    assert b'"finish_reason": "' not in call.body
    assert (call.error.code, call.error.output_tokens) == ("replica_lost", 2)
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert (row.outcome, row.payer, row.output_tokens) == ("replica_lost", "platform", 2)


async def test_usage_that_was_asked_for_passes(sink: usage.MemorySink) -> None:
    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        peer[1].write(OK + chunk("a", "stop") + USAGE + DONE)

    async with external(answer) as url, replica(url, sink) as served:
        body = {**STREAM, "stream_options": {"include_usage": True}}
        call = await asgi.post(served, asgi.identity(), body)
    assert call.client_bytes == chunk("a", "stop") + USAGE + DONE


async def test_refusals_and_a_dead_server(sink: usage.MemorySink) -> None:
    body = b'{"error": {"message": "no"}}'

    async def refuse(peer: Peer, _: dict[str, Any]) -> None:
        peer[1].write(
            b"HTTP/1.1 422 No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )

    async with external(refuse) as url, replica(url, sink) as served:
        call = await asgi.post(served, asgi.identity(), STREAM)
        assert (call.status, bytes(call.body)) == (422, body)
    with pytest.raises(ConnectionError, match="does not answer"):
        async with replica(url, sink):
            pass


async def test_leaving_a_whole_answer_closes_the_connection_upstream(
    sink: usage.MemorySink,
) -> None:
    closed = asyncio.Event()
    begun = asyncio.Event()

    async def silent(peer: Peer, body: dict[str, Any]) -> None:
        begun.set()
        assert await peer[0].read() == b""
        closed.set()

    async with external(silent) as url, replica(url, sink) as served:
        call = asgi.Call()
        task = asyncio.create_task(asgi.post(served, asgi.identity(), {"prompt": "x"}, call=call))
        await begun.wait()
        call.left.set()
        await task
        await asyncio.wait_for(closed.wait(), 5)
    (row,) = sink.rows
    assert isinstance(row, usage.UsageRow)
    assert row.outcome == "client_gone"


async def test_the_environments_proxy_is_not_used(
    sink: usage.MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        peer[1].write(OK + chunk("a", "stop") + DONE)

    async with external(answer) as url, replica(url, sink) as served:
        assert (await asgi.post(served, asgi.identity(), STREAM)).end.finish_reasons == ("stop",)


def test_the_body_gets_the_servers_own_model_name_and_is_else_untouched() -> None:
    assert upstream.prepare(b"not json", "x").body == b"not json"
    assert upstream.prepare(b'{"model":"m"}', "").body == b'{"model":"m"}'
    sent = upstream.prepare(b'{"model":"m","stream":true}', "big")
    assert json.loads(sent.body) == {
        "model": "big",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert sent.strip_usage


@pytest.mark.parametrize(
    ("weights", "args", "words"),
    [
        ("/models/x", {}, "http:// or https://"),
        ("http://h", {"color": 1}, "'color'"),
        ("http://h", {"api-key-env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_bad_specs_name_their_fault(weights: str, args: dict[str, Any], words: str) -> None:
    spec = fleet.ReplicaSpec("m", "1", fleet.EngineKind.HTTP, weights=weights, engine_args=args)
    with pytest.raises(upstream.OptionsError, match=words):
        upstream.Options.from_spec(spec, {})


async def test_probes_mark_it_down_and_up_again(fake_clock: clock.FakeClock) -> None:
    answers = [False, False, False, True]

    class Probed(proxy.Proxy):
        async def probe(self) -> bool:
            return answers.pop(0) if answers else True

    options = upstream.Options("http://h", probe_s=1.0)
    async with aiohttp.ClientSession() as session:
        probed = Probed(options, session, fake_clock)
        task = asyncio.create_task(probed.watch())
        seen: list[str] = []
        for _ in range(4):
            await fake_clock.advance(0.0)
            seen.append(probed.stats().failure)
            await fake_clock.advance(1.0)
        task.cancel()
    assert seen == ["", "", "http://h does not answer", ""]


def test_events_are_split_at_any_line_end() -> None:
    splitter = sse.Splitter()
    raw = b"data: 1\r\n\r\ndata: 2\n\ndata: 3\r\rrest"
    found = [event for byte in raw for event in splitter.feed(bytes((byte,)))]
    assert found == [b"data: 1\r\n\r\n", b"data: 2\n\n", b"data: 3\r\r"]
    assert splitter.rest == b"rest"
    assert sse.data(b": comment\n\n") == b""
    assert sse.data(b"data: a\ndata: b\n\n") == b"a\nb"
    assert sse.read(b'data: {"choices":[{"text":"\\"error\\": {"}]}\n\n') == sse.PLAIN


def test_a_tap_gives_each_id_once_and_no_prompt_for_several() -> None:
    tap = engine.Tap(lambda: 5)
    tap.prompt([1])
    tap.prompt([2])
    assert tap.prompt_token_ids == ()
    tap.sampled(2)
    tap.released(1, [7])
    tap.emitted(0, [8, 9])
    assert tap.take() == {1: (7,), 0: (8, 9)}
    assert tap.take() == {}
    assert (tap.output_tokens, tap.first_token_us) == (4, 5)
