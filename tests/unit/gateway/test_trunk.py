"""The gateway's end of a trunk: records cut anywhere, streams that are behind, and every way it can end."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import hop, hop_pool, probing, trunk, vouching
from scheduler.contracts import fleet, frames, ids, trunks
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.test_hop import CUTS, FRAME, FakeTransport, pieces, taker

OWNER = (ids.ReplicaId("r1"), 1)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: "
    + trunks.MEDIA_TYPE.encode()
    + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Written(FakeTransport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.sent += data

    def words(self) -> list[tuple[int, int]]:
        """Return the words that were said to the replica."""
        _, _, rest = self.sent.partition(b"\r\n\r\n")
        size = trunks.WORD.size
        each = [rest[at + 3 : at + 3 + size] for at in range(0, len(rest), size + 5)]
        return [trunks.WORD.unpack(one) for one in each]


class Site:
    """A trunk without a replica, and streams on it."""

    def __init__(self) -> None:
        self.ended: list[trunk.Trunk] = []
        self.transport = Written()
        self.trunk = trunk.Trunk(OWNER, "r:1", "s3cret", self.ended.append)
        self.trunk.connection_made(self.transport)
        self.pool = hop_pool.Pool(1.0)

    def stream(self) -> tuple[int, hop.Answer, hop.Connection]:
        connection = hop.Connection(self.pool, "r:1")
        connection.connection_made(FakeTransport())
        answer = connection.expect(60.0)
        connection.place = place = self.trunk.enter(answer)
        return int(place.name.rpartition(b".")[2]), answer, connection


def record(number: int, *items: frames.Frame) -> bytes:
    body = b"".join(item.encode() for item in items)
    return trunks.RECORD.pack(number, len(body)) + body


def chunk(*records: bytes) -> bytes:
    body = b"".join(records)
    return b"%x\r\n%b\r\n" % (len(body), body)


DATA = FRAME.filter(lambda frame: frame.kind in (frames.Kind.DATA, frames.Kind.PROMPT))
SAID = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.lists(DATA, min_size=1, max_size=3)), min_size=1)
)


@settings(deadline=None)
@given(SAID, CUTS)
def test_what_is_heard_does_not_depend_on_how_the_bytes_are_cut(
    said: list[list[tuple[int, list[frames.Frame]]]], cuts: list[int]
) -> None:
    async def heard() -> None:
        site = Site()
        streams = [site.stream() for _ in range(3)]  # 0 is nobody's number: its client has left
        got: dict[int, list[frames.Frame]] = {number: [] for number, *_ in streams}

        def take(number: int) -> hop.Take:
            return lambda frame: got[number].append(frame) or True  # type: ignore[func-returns-value]  # None

        tasks = [
            asyncio.create_task(answer.each(take(number))) for number, answer, _ in streams[:2]
        ]
        await asyncio.sleep(0)
        raw = HEAD + b"".join(
            chunk(*(record(number, *items) for number, items in step)) for step in said
        )
        for piece in pieces(raw, cuts):
            site.trunk.data_received(piece)
        # The third was not listened to until now.
        tasks.append(asyncio.create_task(streams[2][1].each(take(streams[2][0]))))
        await asyncio.sleep(0)
        for number, found in got.items():
            wanted = [f for step in said for to, items in step if to == number for f in items]
            assert found == wanted
        assert not site.trunk.closed
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(heard())


async def test_an_answers_end_on_its_own_connection_may_come_first() -> None:
    site = Site()
    number, answer, connection = site.stream()
    site.trunk.data_received(HEAD)
    got, take = taker()
    ends = asyncio.create_task(answer.each(take))
    await asyncio.sleep(0)
    own = b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.forebay.frames\r\n"
    connection.data_received(own + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    assert not ends.done()
    end = frames.End(("stop",), 1, 0, 1).frame()
    site.trunk.data_received(chunk(record(number, harness.data(b"x", 7), end)))
    last = await ends
    assert last is not None
    assert (last.kind, got) == (frames.Kind.END, [7])
    connection.leave()
    assert connection.answer is None  # at rest, for the next request
    assert connection.place is None
    site.trunk.data_received(chunk(record(number, harness.data(b"x", 8))))  # nobody's any more
    assert not site.trunk.closed


async def test_frames_may_come_before_the_head_on_the_own_connection() -> None:
    site = Site()
    number, answer, _ = site.stream()
    site.trunk.data_received(HEAD + chunk(record(number, harness.data(b"x", 7))))
    async with asyncio.timeout(10):
        assert (await answer.head()).framed


async def test_a_client_that_is_behind_stops_its_own_stream_alone() -> None:
    site = Site()
    slow, answer, connection = site.stream()
    fast, other, _ = site.stream()
    site.trunk.data_received(HEAD)
    got, take = taker()
    reads = asyncio.create_task(other.each(take))
    stopped = asyncio.create_task(answer.each(lambda frame: False))
    await asyncio.sleep(0)
    sent = 0
    while not site.transport.words():
        sent += 1
        step = [record(n, harness.data(b"%d" % sent * 500, sent)) for n in (slow, fast)]
        site.trunk.data_received(chunk(*step))
    assert sent < 200  # 64 KiB are kept, and no more
    assert site.transport.words() == [(trunks.PAUSE, slow)]
    assert connection.paused
    assert got == list(range(1, sent + 1))
    assert await stopped is None

    behind, take = taker()
    goes_on = asyncio.create_task(answer.each(take))
    await asyncio.sleep(0)
    assert behind == list(range(2, sent + 1))
    assert site.transport.words() == [(trunks.PAUSE, slow), (trunks.RESUME, slow)]
    for task in (reads, goes_on):
        task.cancel()
    await asyncio.wait({reads, goes_on})


@pytest.mark.parametrize("lost", [False, True])
async def test_who_leaves_a_stopped_stream_lets_its_replica_end_it(lost: bool) -> None:
    """Its last words may wait there, when nobody listens any more whether the own connection closes."""
    site = Site()
    number, _, connection = site.stream()
    site.trunk.data_received(HEAD)
    while not site.transport.words():
        site.trunk.data_received(chunk(record(number, harness.data(b"x" * 5_000, 1))))
    if lost:
        connection.connection_lost(ConnectionResetError("reset"))
    connection.leave()
    assert site.transport.words() == [(trunks.PAUSE, number), (trunks.RESUME, number)]
    said = site.transport.sent
    site.trunk.data_received(chunk(record(number, harness.data(b"x", 1))))  # nobody's any more
    assert not site.trunk.closed
    assert site.transport.sent == said


BAD = {
    "no trunk": b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
    "another kind": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n",
    "no HTTP": b"SSH-2.0\r\n\r\n",
    "a head without end": b"HTTP/1.1 200 OK\r\nx: " + b"a" * 20_000,
    "a size that is none": HEAD + b"zz\r\n",
    "a size without end": HEAD + b"0" * 100,
    "a chunk beyond all frames": HEAD + b"fffffff\r\n",
    "half a record": HEAD + chunk(b"\0\0\0\1"),
    "a record beyond its chunk": HEAD + chunk(trunks.RECORD.pack(1, 99)),
    "half a frame": HEAD + chunk(trunks.RECORD.pack(1, 3) + b"abc"),
    "a frame of an unknown kind": HEAD + chunk(trunks.RECORD.pack(1, 20) + b"\x09" * 20),
    "its end": HEAD + b"0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_trunk_breaks_its_streams_and_nothing_else(name: str) -> None:
    site = Site()
    _, answer, _ = site.stream()
    waits = asyncio.create_task(answer.each(lambda frame: True))
    await asyncio.sleep(0)
    site.trunk.data_received(BAD[name])
    with pytest.raises(hop.Broken):
        await waits
    assert site.ended == [site.trunk]
    assert site.transport.aborted


async def test_what_a_taker_raises_ends_its_own_stream_alone() -> None:
    site = Site()
    number, answer, _ = site.stream()
    other, second, _ = site.stream()

    def take(frame: frames.Frame) -> bool:
        raise LookupError("no")

    fails = asyncio.create_task(answer.each(take))
    got, good = taker()
    reads = asyncio.create_task(second.each(good))
    await asyncio.sleep(0)
    step = [record(n, harness.data(b"x", 7)) for n in (number, other)]
    site.trunk.data_received(HEAD + chunk(*step))
    with pytest.raises(LookupError):
        await fails
    assert got == [7]
    reads.cancel()
    await asyncio.wait({reads})


async def test_a_lost_trunk_breaks_its_streams() -> None:
    site = Site()
    _, answer, _ = site.stream()
    site.trunk.data_received(HEAD)
    waits = asyncio.create_task(answer.each(lambda frame: True))
    await asyncio.sleep(0)
    site.trunk.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(hop.Broken, match="reset"):
        await waits


async def test_a_replica_without_trunks_is_not_asked_with_each_stream() -> None:
    """An older replica answers 404; its streams have their own connections."""
    asked = 0

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(harness.NO_TRUNK)
        writer.close()

    server = await asyncio.start_server(old, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    known = trunk.Trunks(probing.Probes(), vouching.Vouching())
    for _ in range(3):
        assert known.of(OWNER, f"{host}:{port}", "s3cret") is None
    await harness.until(lambda: not known._known)
    assert known.of(OWNER, f"{host}:{port}", "s3cret") is None
    assert not known._known
    assert asked == 1
    known.close()
    server.close()
    await server.wait_closed()


async def test_a_trunk_to_a_replica_that_the_fleet_lost_ends() -> None:
    watch = vouching.Vouching()
    known = trunk.Trunks(probing.Probes(), watch)
    site = Site()
    known._known[OWNER] = site.trunk
    watch.see(fleets.make_view([fleets.make_replica("r1")]))
    known.doubt()
    assert not site.trunk.closed
    lost = fleets.make_replica("r1", state=fleet.ReplicaState.LOST)
    watch.see(fleets.make_view([lost]))
    known.doubt()
    assert site.trunk.closed
