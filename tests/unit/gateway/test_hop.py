"""The hop to a replica: responses cut anywhere, connections kept and dropped, silence, backpressure."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import hop, hop_pool, hop_reader, replica
from gateway import settings as gateway_settings
from scheduler.contracts import errors, fleet, frames, usage
from tests.unit.gateway import fleets, harness

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.forebay.frames\r\n"
KINDS = st.sampled_from(list(frames.Kind))
FRAME = st.builds(
    frames.Frame.of,
    KINDS,
    st.binary(max_size=300),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
    st.integers(0, 9),
    st.integers(0, 50),
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
)
CUTS = st.lists(st.integers(1, 200), max_size=30)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    out, at = [], 0
    for size in sizes:
        out.append(data[at : at + size])
        at += size
    return [piece for piece in [*out, data[at:]] if piece]


def body(raw: bytes, how: str, chunks: list[int]) -> bytes:
    if how == "length":
        return HEAD + b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    if how == "close":
        return HEAD + b"\r\n" + raw
    coded = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in pieces(raw, chunks))
    return HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + coded + b"0\r\nx-trailer: 1\r\n\r\n"


@settings(deadline=None)
@given(st.lists(FRAME, max_size=8), st.sampled_from(["length", "close", "chunks"]), CUTS, CUTS)
def test_what_is_read_does_not_depend_on_how_the_bytes_are_cut(
    sent: list[frames.Frame], how: str, chunks: list[int], cuts: list[int]
) -> None:
    """G6: neither chunks nor reads need respect a frame's bounds."""
    raw = b"HTTP/1.1 103 Early\r\n\r\n" + body(b"".join(f.encode() for f in sent), how, chunks)
    reader = hop_reader.Reader()
    found = [frame for piece in pieces(raw, cuts) for frame in reader.feed(piece)]
    reader.end()
    assert found == sent
    assert reader.complete
    assert (reader.status, reader.framed) == (200, True)
    assert reader.keep_alive is (how != "close")


@settings(deadline=None)
@given(st.binary(max_size=400), CUTS)
def test_rubbish_is_refused_or_read_never_more(raw: bytes, cuts: list[int]) -> None:
    for start in (b"", HEAD + b"transfer-encoding: chunked\r\n\r\n", HEAD + b"\r\n"):
        reader = hop_reader.Reader()
        with contextlib.suppress(hop_reader.BadResponse, frames.FrameError):
            for piece in pieces(start + raw, cuts):
                reader.feed(piece)


BAD = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "a size below zero": HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\n",
    "a size with more in it": HEAD + b"transfer-encoding: chunked\r\n\r\n1_0\r\n",
    "a size without end": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 2000,
    "two lengths": HEAD + b"content-length: 1, 2\r\n\r\n",
    "gzip": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
    "a head without end": HEAD + b"x: " + b"a" * 70_000,
    "more than its answer": HEAD + b"content-length: 0\r\n\r\nHTTP/1.1",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_responses(name: str) -> None:
    reader = hop_reader.Reader()
    with pytest.raises(hop_reader.BadResponse):
        reader.feed(BAD[name])


def test_an_engines_long_error_is_cut() -> None:
    reader = hop_reader.Reader()
    reader.feed(b"HTTP/1.1 400 No\r\ncontent-type: application/json\r\n\r\n")
    for _ in range(10):
        assert not reader.feed(b"x" * 50_000)
    assert len(reader.text) == 64 * 1024
    assert not reader.keep_alive


class FakeTransport(asyncio.Transport):
    """Counts what a connection does to it."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.aborted = False

    def write(self, data: object) -> None:
        """Nothing is sent anywhere."""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


def answering() -> tuple[hop.Answer, hop.Connection, FakeTransport]:
    connection, transport = hop.Connection(hop_pool.Pool(1.0), "r:1"), FakeTransport()
    connection.connection_made(transport)
    return connection.send(b"", 60.0), connection, transport


def piece(number: int, size: int = 10) -> bytes:
    frame = harness.data(b"%d" % number * size, number).encode()
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def taker() -> tuple[list[int], hop.Take]:
    """Return a taker that is never behind, and the ids that it was given."""
    got: list[int] = []

    def take(frame: frames.Frame) -> bool:
        got.extend(frame.token_ids)
        return True

    return got, take


END = frames.End(("stop",), 1, 0, 1).frame().encode()
LAST = b"%x\r\n%b\r\n0\r\n\r\n" % (len(END), END)
BEGIN = HEAD + b"transfer-encoding: chunked\r\n\r\n"


async def test_frames_are_given_in_the_callback_and_in_order_around_a_client_that_is_behind() -> (
    None
):
    answer, connection, transport = answering()
    got: list[int] = []
    behind = {3, 4}

    def take(frame: frames.Frame) -> bool:
        got.append(frame.token_ids[0])
        return frame.token_ids[0] not in behind

    connection.data_received(BEGIN + piece(1))
    assert (await answer.head()).framed
    first = asyncio.create_task(answer.each(take))
    await asyncio.sleep(0)
    assert got == [1]
    connection.data_received(piece(2))
    assert got == [1, 2]  # no task had to run
    connection.data_received(piece(3) + piece(4) + piece(5))
    assert got == [1, 2, 3]
    connection.data_received(piece(6))
    assert await first is None
    assert await answer.each(take) is None
    assert got == [1, 2, 3, 4]
    last = asyncio.create_task(answer.each(take))
    await asyncio.sleep(0)
    assert got == [1, 2, 3, 4, 5, 6]
    connection.data_received(LAST)
    found = await last
    assert found is not None
    assert found.kind is frames.Kind.END
    connection.leave()
    assert not transport.aborted
    assert connection.answer is None


async def test_what_nobody_takes_is_bounded_and_read_later() -> None:
    answer, connection, transport = answering()
    connection.data_received(BEGIN)
    await answer.head()
    number = 0
    while transport.reading:
        number += 1
        connection.data_received(piece(number, 1000))
    assert number < 100  # 64 KiB, and no more

    got, take = taker()
    waiting = asyncio.create_task(answer.each(take))
    await asyncio.sleep(0)
    assert got == list(range(1, number + 1))
    assert transport.reading
    waiting.cancel()
    await asyncio.wait({waiting})
    connection.leave()
    assert transport.aborted


async def test_what_the_taker_raises_comes_out_of_each() -> None:
    answer, connection, _ = answering()
    connection.data_received(BEGIN)

    def take(frame: frames.Frame) -> bool:
        raise errors.BadRequest("no")

    waiting = asyncio.create_task(answer.each(take))
    await asyncio.sleep(0)
    connection.data_received(piece(1))
    with pytest.raises(errors.BadRequest):
        await waiting


IDENTITY = usage.Identity(
    *("q1", 1, "c1", "team", "ann", "k", "chat", "1", "", "/v1/chat/completions", "interactive"),
    *("r1", "l1", "7", 1, 2),
    custom_id="100 % Öl\n",
)


@contextlib.asynccontextmanager
async def client(stream_idle_s: float = 60.0) -> AsyncIterator[replica.Client]:
    table = gateway_settings.GatewaySettings(stream_idle_s=stream_idle_s, connect_timeout_s=30.0)
    async with replica.Client(table) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(
    hops: replica.Client, where: fleet.Replica, asked: replica.Call
) -> AsyncIterator[replica.Answer]:
    answer = await hops.send(where, asked)
    try:
        yield answer
    finally:
        answer.leave()


def call(silence_s: float = 20.0) -> replica.Call:
    return replica.Call("/v1/chat/completions", b'{"model": "chat"}', IDENTITY, silence_s)


async def read(opened: replica.Answer) -> frames.Frame | None:
    return await opened.each(lambda frame: True)


async def test_a_connection_is_used_again_and_the_identity_arrives_as_it_was(
    tmp_path: Path,
) -> None:
    async with harness.FakeReplica(harness.hello).listening() as fake, client() as hops:
        where = fake.replica(tmp_path)
        for _ in range(3):
            async with opened(hops, where, call()) as answer:
                last = await read(answer)
                assert last is not None
            await asyncio.sleep(0.01)
        assert len(fake._tasks) == 1
        assert fake.received[0].identity == IDENTITY


@pytest.mark.parametrize("after_head", [False, True])
async def test_silence_is_a_loss(after_head: bool, tmp_path: Path) -> None:
    async def silent(received: harness.Received, out: harness.Out) -> None:
        if after_head:
            await out.send(harness.data(b"x", 1))
        await out.gone()

    async with (
        harness.FakeReplica(silent).listening() as fake,
        client(stream_idle_s=0.1) as hops,
    ):
        with pytest.raises(replica.Lost, match=r"silent for 0\.1 s"):
            async with opened(hops, fake.replica(tmp_path), call(0.1)) as answer:
                await read(answer)
        async with asyncio.timeout(10):
            await fake.ended.wait()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "no.such.host.invalid:80", ""])
async def test_who_is_not_there_is_not_reachable(address: str, tmp_path: Path) -> None:
    secret = tmp_path / "s"
    secret.write_text("s")
    where = fleets.make_replica("r1", address=address, secret_file=str(secret))
    async with client() as hops:
        with pytest.raises(replica.Lost, match="not reachable") as caught:
            async with opened(hops, where, call()):
                pytest.fail("nobody is there")
        assert not caught.value.computed


async def _status(status: int, tmp_path: Path) -> None:
    async def says(received: harness.Received, out: harness.Out) -> None:
        await out.json(status, {"error": {"message": "so it is", "param": "x"}})

    async with (
        harness.FakeReplica(says).listening() as fake,
        client() as hops,
        opened(hops, fake.replica(tmp_path), call()),
    ):
        pytest.fail("it is no answer")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, replica.Full),
        (401, replica.Lost),
        (500, replica.Lost),
        (302, replica.Lost),
        (400, errors.BadRequest),
        (404, errors.ModelNotFound),
        (413, errors.BodyTooLarge),
        (200, replica.Lost),
    ],
)
async def test_what_a_status_means(status: int, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        await _status(status, tmp_path)


@pytest.mark.parametrize(
    ("body", "no_adapter"),
    [
        ({"error": {"code": "adapter_missing"}}, True),
        ({"error": {"code": "replica_full"}}, False),
        ({"error": "adapter_missing"}, False),
        (["adapter_missing"], False),
    ],
)
async def test_a_429_tells_a_seat_from_an_adapter(
    body: object, no_adapter: bool, tmp_path: Path
) -> None:
    async def says(received: harness.Received, out: harness.Out) -> None:
        await out.json(429, body)

    with pytest.raises(replica.Full) as caught:
        async with (
            harness.FakeReplica(says).listening() as fake,
            client() as hops,
            opened(hops, fake.replica(tmp_path), call()),
        ):
            pytest.fail("it is no answer")
    assert caught.value.no_adapter is no_adapter


async def test_many_streams_cut_at_random_places_arrive_whole(tmp_path: Path) -> None:
    """A hundred streams on one replica at once, each cut as the network likes."""

    async def scattered(received: harness.Received, out: harness.Out) -> None:
        draw = random.Random(received.body["seed"])
        raw = b"".join(harness.data(b"%d," % n, n).encode() for n in range(50))
        for part in pieces(raw, [draw.randint(1, 60) for _ in range(20)]):
            await out.raw(part)
        await out.finish()

    async def one(hops: replica.Client, where: fleet.Replica, seed: int) -> list[int]:
        asked = replica.Call("/v1/x", b'{"seed": %d}' % seed, IDENTITY, 20.0)
        got, take = taker()
        async with opened(hops, where, asked) as answer:
            await answer.each(take)
        return got

    async with harness.FakeReplica(scattered).listening() as fake, client() as hops:
        where = fake.replica(tmp_path)
        found = await asyncio.gather(*(one(hops, where, seed) for seed in range(100)))
        assert all(got == list(range(50)) for got in found)


def test_a_chunk_that_is_cut_inside_its_lines_end_brings_no_byte_of_it_into_the_body() -> None:
    whole = frames.Frame.of(frames.Kind.DATA, b"data: hello\n\n", (7,)).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
    for at in range(1, len(whole)):  # a frame in two chunks, cut between CR and LF of the first
        reader, first, rest = hop_reader.Reader(), whole[:at], whole[at:]
        found = list(
            reader.feed(head % frames.MEDIA_TYPE.encode() + b"%x\r\n%b\r" % (len(first), first))
        )
        found += reader.feed(b"\n%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest))
        assert [frame.payload for frame in found] == [b"data: hello\n\n"]
        assert reader.complete
