"""The replica's end of a trunk: frames of many streams in one response, streams that must wait, its end."""

import asyncio
from typing import Any

import pytest
from starlette import types

from engines.replica import engine, response, trunk
from scheduler.contracts import frames, trunks, usage
from tests.unit.engines import asgi, scripted


class Gateway:
    """A gateway's end: what it says, and what it has heard by stream."""

    def __init__(self, app: types.ASGIApp, name: str = "t1") -> None:
        self._app = app
        self._name = name
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.call = asgi.Call()
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": trunks.PATH,
            "headers": [
                (b"authorization", f"Bearer {asgi.SECRET}".encode()),
                (trunks.HEADER.encode(), self._name.encode()),
            ],
        }
        await self._app(scope, self._said.get, self._send)

    async def _send(self, message: types.Message) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
        await self.call.send(message)

    def say(self, body: bytes, *, more: bool = True) -> None:
        self._said.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def word(self, word: int, number: int) -> None:
        self.say(trunks.WORD.pack(word, number))

    def leave(self) -> None:
        self._said.put_nowait({"type": "http.disconnect"})

    def heard(self, number: int) -> list[frames.Frame]:
        data, at, found = bytes(self.call.body), 0, b""
        while at < len(data):
            whose, size = trunks.RECORD.unpack_from(data, at)
            at += trunks.RECORD.size
            found += data[at : at + size] if whose == number else b""
            at += size
        assert at == len(data), "half a record"
        decoder = frames.Decoder()
        each = list(decoder.feed(found))
        assert decoder.empty
        return each

    async def open(self) -> "Gateway":
        async with asyncio.timeout(10):
            while not self.call.status:  # noqa: ASYNC110 - a test's look at what ASGI has sent
                await asyncio.sleep(0)
        return self


def asks(number: int, name: str = "t1") -> dict[str, str]:
    who = asgi.identity(f"r{number}")
    return {**asgi.headers(who), trunks.HEADER: trunks.named(name, number)}


async def ask(app: types.ASGIApp, number: int, **more: Any) -> asgi.Call:
    return await asgi.run(app, "POST", "/v1/completions", asks(number), {"prompt": "x"}, **more)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_streams_come_on_the_trunk_as_they_would_on_their_own_connections(
    sink: usage.MemorySink,
) -> None:
    _, app = scripted.build(scripted.whole, sink)
    wanted = (await asgi.post(app, asgi.identity("r0"))).all
    gateway = await Gateway(app).open()
    calls = await asyncio.gather(*(ask(app, number) for number in (1, 2)))
    await settle()
    for number, call in zip((1, 2), calls, strict=True):
        assert (call.status, bytes(call.body), call.ended) == (200, b"", True)
        assert gateway.heard(number) == wanted
    assert not gateway.call.ended
    gateway.leave()
    await gateway.task


async def test_what_no_trunk_is_there_for_comes_on_its_own_connection(
    sink: usage.MemorySink,
) -> None:
    _, app = scripted.build(scripted.whole, sink)
    assert (await ask(app, 1)).all[-1].kind is frames.Kind.END  # it has not opened one
    gateway = await Gateway(app).open()
    gateway.say(b"", more=False)  # and this one is through
    await gateway.task
    assert (await ask(app, 2)).all[-1].kind is frames.Kind.END


async def test_a_refusal_stays_on_its_own_connection(sink: usage.MemorySink) -> None:
    async def refuses(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        await scripted.begin(send, "application/json", 400)
        await scripted.part(send, b'{"error": {"message": "no"}}', more=False)

    _, app = scripted.build(refuses, sink)
    gateway = await Gateway(app).open()
    call = await ask(app, 1)
    assert (call.status, call.json) == (400, {"error": {"message": "no"}})
    assert not gateway.heard(1)
    gateway.leave()
    await gateway.task


async def test_a_stream_whose_reader_is_behind_waits_and_no_other_does(
    sink: usage.MemorySink,
) -> None:
    sent = {"r1": 0, "r2": 0}
    goes_on = asyncio.Event()

    async def many(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        tap.prompt([1])
        tap.prefilled(1)
        await scripted.begin(send)
        for token in range(20):
            if token == 3:
                await goes_on.wait()
            tap.emitted(0, [token])
            await scripted.part(send, scripted.chunk("a"))
            sent[key] += 1
        tap.finished(0, "stop")
        await scripted.part(send, scripted.chunk("", "stop"))
        await scripted.part(send, b"data: [DONE]\n\n", more=False)

    _, app = scripted.build(many, sink)
    gateway = await Gateway(app).open()
    streams = [asyncio.create_task(ask(app, number)) for number in (1, 2)]
    await settle()
    gateway.word(trunks.PAUSE, 1)
    await settle()
    goes_on.set()
    async with asyncio.timeout(10):
        await streams[1]
    await settle()
    assert gateway.heard(2)[-1].kind is frames.Kind.END
    assert sent == {"r1": 3, "r2": 20}
    assert not streams[0].done()
    gateway.word(trunks.RESUME, 1)
    async with asyncio.timeout(10):
        await streams[0]
    await settle()
    ids = [i for f in gateway.heard(1) if f.kind is frames.Kind.DATA for i in f.token_ids]
    assert ids == list(range(20))
    gateway.leave()
    await gateway.task


async def test_a_client_that_leaves_while_its_stream_is_stopped_frees_the_seat(
    sink: usage.MemorySink,
) -> None:
    inner, app = scripted.build(scripted.endless, sink)
    gateway = await Gateway(app).open()
    gateway.word(trunks.PAUSE, 1)  # of nobody yet: it stops nothing
    call = asgi.Call()
    stream = asyncio.create_task(ask(app, 1, call=call))
    await inner.started.wait()
    await settle()
    gateway.word(trunks.PAUSE, 1)
    await settle()
    call.left.set()
    async with asyncio.timeout(10):
        await stream
    assert not inner.running
    gateway.leave()
    await gateway.task


async def test_words_of_a_stopped_stream_that_has_left_wait_for_nobody() -> None:
    """A sender beside the engine's app is not cancelled with it: left waiting, it would be there for ever."""
    lines = trunk.Trunks()
    gateway = await Gateway(lines).open()
    stream = lines.of({"headers": [(trunks.HEADER.encode(), trunks.named("t1", 1).encode())]})
    assert stream is not None
    call = asgi.Call()
    send = stream.through(call.send)
    await send({"type": "http.response.start", "status": 200, "headers": response.FRAMES_HEADERS})
    gateway.word(trunks.PAUSE, 1)
    await settle()
    word = frames.Frame.of(frames.Kind.DATA, b"x", (7,)).encode()
    waits = asyncio.create_task(scripted.part(send, word))
    await settle()
    assert not waits.done()
    stream.leave()
    async with asyncio.timeout(10):
        await waits
    await settle()
    assert not gateway.heard(1)
    gateway.leave()
    await gateway.task


async def test_a_trunk_that_is_not_read_makes_its_streams_wait_and_its_end_lets_them_go(
    sink: usage.MemorySink,
) -> None:
    sent = 0

    async def floods(inner: Any, key: str, tap: engine.Tap, send: types.Send) -> None:
        nonlocal sent
        tap.prompt([1])
        tap.prefilled(1)
        await scripted.begin(send)
        while sent < 1000:
            tap.emitted(0, [sent])
            await scripted.part(send, scripted.chunk("x" * 16_000))
            sent += 1

    _, app = scripted.build(floods, sink)
    gateway = await Gateway(app).open()
    gateway.reads.clear()
    stream = asyncio.create_task(ask(app, 1))
    await settle()
    assert 50 < sent < 100  # a MiB, and no more
    gateway.leave()
    gateway.reads.set()
    async with asyncio.timeout(10):
        await stream
        await gateway.task
    assert sent == 1000  # into nothing: its gateway ends its connection, too


@pytest.mark.parametrize("name", ["", "x" * 65, "t1"])
async def test_a_trunk_has_a_name_of_its_own(sink: usage.MemorySink, name: str) -> None:
    _, app = scripted.build(scripted.whole, sink)
    gateway = await Gateway(app).open()
    second = Gateway(app, name)
    await second.task
    assert second.call.status == 400
    gateway.leave()
    await gateway.task


async def test_a_trunk_ends_with_its_last_stream_when_the_server_stops(
    sink: usage.MemorySink,
) -> None:
    inner, app = scripted.build(scripted.endless, sink)
    gateway = await Gateway(app).open()
    call = asgi.Call()
    stream = asyncio.create_task(ask(app, 1, call=call))
    await inner.started.wait()
    await settle()
    app.end()  # type: ignore[attr-defined]  # the stack is a Replica
    await settle()
    assert not gateway.task.done()
    call.left.set()
    await stream
    async with asyncio.timeout(10):
        await gateway.task
    assert gateway.call.ended
    late = Gateway(app, "t2")
    await late.task
    assert late.call.status == 400
