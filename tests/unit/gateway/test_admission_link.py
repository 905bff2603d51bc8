"""Admission over a link: turns, refusals, workers and owners that die."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from gateway import asks, local_room
from gateway.admission import link, messages, owner, remote
from scheduler.contracts import clock, errors, ids, quota, wire
from tests.unit.gateway import harness
from tests.unit.gateway.admission_site import (
    ONE,
    TOKEN,
    B,
    Book,
    I,
    ask,
    dependencies_of,
    house,
    turn,
)


async def test_two_workers_share_one_queue_and_one_load() -> None:
    async with house(ONE) as made, made.worker() as first, made.worker() as second:
        await harness.until(lambda: first.connected and second.connected)
        a = first.enter(ask("a"))
        grant = await turn(first, a)
        assert grant.replica == ONE.replicas[0]
        assert grant.version == "1"
        b = second.enter(ask("b"))
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
        grant.close()
        other = await turn(second, b)
        assert made.room.loads.total(ids.ReplicaId("r1")) == 1
        first.leave(a, quota.Spent(5, 2, 3))
        other.close()
        second.leave(b)
        await harness.until(lambda: made.room.loads.idle and not made.book.held)
        assert made.book.settled == [("a", quota.Spent(5, 2, 3)), ("b", quota.NOTHING)]
        assert (await stat_socket(made.path)) == 0o600


async def stat_socket(path: Path) -> int:
    return (await asyncio.to_thread(path.stat)).st_mode & 0o777


async def test_refusals_come_over_whole() -> None:
    async with house(ONE, queue_interactive=1) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        poor = ask("p")
        poor = asks.Asking(
            **{name: getattr(poor, name) for name in poor.__struct_fields__} | {"team": "poor"}
        )
        with pytest.raises(errors.QuotaExceeded) as told:
            await turn(room, room.enter(poor))
        assert told.value.retry_after_s == 7.0
        running, waits = room.enter(ask("a")), room.enter(ask("b"))
        await turn(room, running)
        with pytest.raises(errors.Shed) as shed:
            await turn(room, room.enter(ask("c")))
        assert shed.value.retry_after_s == 1.0
        room.leave(waits)
        late = ask("d", deadline_us=clock.SystemClock().wall_us() + 30_000)
        with pytest.raises(errors.Expired):
            await turn(room, room.enter(late))


async def test_a_request_that_had_its_turn_keeps_its_place() -> None:
    async with house(ONE) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        a, b = room.enter(ask("a")), room.enter(ask("b"))
        grant = await turn(room, a)
        grant.close()
        room.full(grant.replica, I)
        room.again(a)
        assert (await turn(room, a)).replica.replica_id == "r1"
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
        room.leave(a)
        await turn(room, b)
        room.suspect(grant.replica)
        room.first_token("chat", 12.5)
        await harness.until(lambda: bool(made.room.demand()[0].ttft_ms))
        assert made.room.demand()[0].ttft_ms == (12.5,)
        assert made.room.demand()[0].in_flight["interactive"] == 1


async def test_a_worker_that_dies_gives_back_turns_places_and_holds() -> None:
    async with house(ONE) as made, made.worker() as stays:
        await harness.until(lambda: stays.connected)
        async with made.worker() as dies:
            await harness.until(lambda: dies.connected)
            await turn(dies, dies.enter(ask("a")))
            dies.enter(ask("b"))
            c = stays.enter(ask("c"))
            await harness.until(lambda: made.room.waiting("chat")["interactive"] == 2)
        await turn(stays, c)
        assert set(made.book.held) == {"c"}
        assert made.room.loads.total(ids.ReplicaId("r1")) == 1


async def test_an_owner_that_dies_leaves_running_streams_alone_and_its_heir_counts_them() -> None:
    async with house(ONE) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        a = room.enter(ask("a"))
        grant = await turn(room, a)
        later, b = ask("c"), room.enter(ask("b"))
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
        await made.end()
        await harness.until(lambda: not room.connected)
        c = room.enter(later)  # waits for the heir
        await made.start(workers=1)
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 2)
        assert made.room.loads.total(ids.ReplicaId("r1")) == 1
        assert made.book.adopted == ["a"]
        grant.close()
        room.leave(a, quota.Spent(1, 0, 1))
        first = await asyncio.wait({turns := asyncio.create_task(turn(room, c))}, timeout=20)
        assert turns in first[0]  # it arrived before b
        room.leave(c)
        await turn(room, b)
        room.leave(b)
        await harness.until(lambda: made.room.loads.idle and not made.book.held)


async def test_what_had_ended_while_there_was_no_owner_can_wait_again() -> None:
    async with house(ONE) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        a = room.enter(ask("a"))
        grant = await turn(room, a)
        await made.end()
        await harness.until(lambda: not room.connected)
        grant.close()
        await made.start()
        await harness.until(lambda: room.connected)
        room.again(a)
        await turn(room, a)


async def test_without_an_owner_for_long_requests_are_told_to_come_back() -> None:
    async with house(ONE, admission_wait_s=0.3) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        await made.end()
        await harness.until(lambda: not room.connected)
        with pytest.raises(errors.NoReplica) as told:
            await turn(room, room.enter(ask("a")))
        assert told.value.retry_after_s == 1.0
        with pytest.raises(errors.NoReplica):
            room.enter(ask("b"))


async def test_a_worker_with_another_token_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    async with house(ONE) as made, made.worker("wrong", admission_wait_s=0.2) as room:
        with pytest.raises(errors.NoReplica):
            await turn(room, room.enter(ask("a")))
        assert not room.connected
    assert "another token" in caplog.text


@pytest.mark.parametrize(
    "rubbish",
    [b"\xff" * 64, messages.LENGTH.pack(3) + b"abc", messages.encode(messages.Welcome("x"))],
)
async def test_rubbish_ends_the_link_and_nothing_else(rubbish: bytes) -> None:
    async with house(ONE) as made:
        reader, writer = await asyncio.open_unix_connection(str(made.path))
        writer.write(rubbish)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        async with made.worker() as room:
            await harness.until(lambda: room.connected)


async def test_messages_may_come_in_pieces() -> None:
    heard: list[messages.FromWorker] = []
    made: link.Link[messages.FromWorker] = link.Link(
        messages.from_worker, lambda _, word: heard.append(word), lambda _: None
    )
    said: list[messages.FromWorker] = [
        messages.Hello("t", "w"),
        messages.Enter(ask("a", B, cache_hint="k")),
        messages.Close("a"),
    ]
    for byte in b"".join(messages.encode(word) for word in said):
        made.data_received(bytes([byte]))
    assert heard == said


async def test_an_owner_waits_for_its_workers_before_the_first_turn() -> None:
    async with house(ONE) as made:
        await made.end()
        await made.start(workers=2)
        async with made.worker() as first:
            await harness.until(lambda: first.connected)
            a = first.enter(ask("a"))
            await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
            async with made.worker():
                await turn(first, a)


async def test_a_stream_that_waits_again_is_let_in_by_the_heir_whatever_its_bounds_say() -> None:
    """It began two minutes ago; limit, bound and quota were passed when it came, and are not asked again."""
    async with house(ONE, queue_interactive=1) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        long_ago = clock.SystemClock().wall_us() - 120_000_000
        old = msgspec.structs.replace(ask("a"), arrived_us=long_ago)
        a = room.adopt(old, ONE.replicas[0], "1")
        b = room.enter(ask("b"))
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
        assert a.open is not None
        a.open.close()
        grant = await turn(room, b)
        room.again(a, "1")
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
        await made.end()
        await harness.until(lambda: not room.connected)
        await made.start()
        await harness.until(lambda: set(made.book.held) == {"a", "b"})
        assert sorted(made.book.adopted) == ["a", "b"]
        grant.close()
        assert (await turn(room, a)).version == "1"


@pytest.mark.parametrize("running", [True, False])
async def test_a_request_told_over_two_links_counts_once(running: bool) -> None:
    """A half-open link: its worker comes back over a new one before the end of the old is noticed."""
    book = Book()
    room = local_room.LocalRoom(dependencies_of(ONE, book))
    served = owner.Owner(room, TOKEN, "g1")
    first, second = (served.accept() for _ in range(2))
    wires = [FakeWire(), FakeWire()]
    first.connection_made(wires[0])
    second.connection_made(wires[1])
    asked = ask("a")
    bare = wire.replica_to_pb(ONE.replicas[0]).SerializeToString()
    told: list[messages.FromWorker] = [messages.Enter(asked), messages.Enter(asked)]
    if running:
        told[1] = messages.Adopt(asked, bare, "1")
    for to, word in zip((first, second), told, strict=True):
        to.data_received(messages.encode(messages.Hello(TOKEN, "w")))
        to.data_received(messages.encode(word))
    first.connection_lost(None)
    assert room.loads.total(ids.ReplicaId("r1")) == 1
    assert set(book.held) == {"a"}
    second.data_received(messages.encode(messages.Leave("a", 1, 0, 1)))
    await asyncio.sleep(0)
    assert room.loads.idle
    assert not book.held
    second.connection_lost(None)


async def test_a_link_on_which_nothing_is_heard_ends() -> None:
    lost: list[object] = []
    made = link.Link(messages.from_owner, lambda *_: None, lost.append)
    wire_ = FakeWire()
    made.connection_made(wire_)
    for _ in range(link.MISSED):
        made.beat()
    made.data_received(messages.encode(messages.Beat()))  # it lives after all
    for _ in range(link.MISSED):
        made.beat()
    assert not wire_.closed
    made.beat()
    assert wire_.closed
    made.connection_lost(None)
    assert lost == [made]


class FakeWire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Lose it."""

    def abort(self) -> None:
        self.closed = True


async def test_a_request_is_cancelled_from_another_worker_by_its_caller_alone() -> None:
    """A gRPC `Cancel` comes on any connection, so to any worker; the one that has the request ends it."""
    async with house(ONE) as made, made.worker() as first, made.worker() as second:
        await harness.until(lambda: first.connected and second.connected)
        ended: list[str] = []
        first.hear(ended.append)
        runs, waits = first.enter(ask("a")), first.enter(ask("b"))
        await turn(first, runs)
        await harness.until(lambda: made.room.waiting("chat")["interactive"] == 1)
        for name in ("a", "b"):
            assert not await second.cancel(name, "physics", "bob")
            assert not await second.cancel(name, "chem", "ann")
            assert await second.cancel(name, "physics", "ann")
        await harness.until(lambda: ended == ["a", "b"])
        first.leave(runs)
        first.leave(waits)
        await harness.until(lambda: made.room.loads.idle)
        assert not await second.cancel("a", "physics", "ann")


async def test_a_cancellation_is_told_to_the_heir_of_an_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "CANCEL_S", 20.0)
    async with house(ONE) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        ended: list[str] = []
        room.hear(ended.append)
        await turn(room, room.enter(ask("a")))
        await made.end()
        await harness.until(lambda: not room.connected)
        asked = asyncio.create_task(room.cancel("a", "physics", "ann"))
        await asyncio.sleep(0)
        await made.start(workers=1)
        assert await asked
        assert ended == ["a"]


async def test_an_owner_that_stays_away_knows_of_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "CANCEL_S", 0.01)
    async with house(ONE) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        await made.end()
        await harness.until(lambda: not room.connected)
        assert not await room.cancel("a", "physics", "ann")
