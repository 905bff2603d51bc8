"""Admission over a link: turns, refusals, workers and owners that die, hosts that split the models."""

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway import asks, dependencies, local_room, settings, waiting
from gateway.admission import link, messages, owner, ownership, place, remote, rooms, split
from scheduler.contracts import clock, errors, fleet, ids, ports, quota, requests, usage, wire
from tests.unit.gateway import harness

I, B = requests.Tier.INTERACTIVE, requests.Tier.BATCH  # noqa: E741 - tiers
TOKEN = "t0ken"


def ask(name: str, tier: requests.Tier = I, model: str = "chat", **fields: Any) -> asks.Asking:
    return asks.of(
        requests.InferenceRequest(
            request_id=ids.RequestId(name),
            endpoint=requests.Endpoint.CHAT,
            body=harness.chat_body(),
            model=model,
            tier=tier,
            caller=harness.ANN,
            stream=False,
            arrived_us=clock.SystemClock().wall_us(),
            **fields,
        )
    )


class Book:
    """Quotas that remember what is held and what was settled."""

    def __init__(self) -> None:
        self.held: dict[str, quota.Claim] = {}
        self.adopted: list[str] = []
        self.settled: list[tuple[str, quota.Spent]] = []

    def reserve(self, claim: quota.Claim) -> quota.Hold:
        if claim.team == "poor":
            raise errors.QuotaExceeded("used up", retry_after_s=7.0)
        self.held[claim.request_id] = claim
        return _Hold(self, claim.request_id)

    def adopt(self, claim: quota.Claim) -> quota.Hold:
        self.adopted.append(claim.request_id)
        return self.reserve(claim)


@dataclasses.dataclass
class _Hold:
    book: Book
    name: str

    def headers(self, now_us: int) -> quota.Headers:
        return ()

    def settle(self, spent: quota.Spent, now_us: int) -> None:
        if self.book.held.pop(self.name, None) is not None:
            self.book.settled.append((self.name, spent))


def dependencies_of(view: fleet.FleetView, book: Book | None = None, **options: Any) -> Any:
    return dependencies.Dependencies(
        settings.GatewaySettings(**options),
        ports.StaticKeys(harness.KEYS),
        ports.StaticFleet(view),
        usage.MemorySink(),
        clock.SystemClock(),
        "c1",
        quotas=book or quota.Unlimited(),
    )


class House:
    """An owner that can be ended and started again, and workers of it."""

    def __init__(self, folder: Path, view: fleet.FleetView, **options: Any) -> None:
        self.path = folder / "admission.sock"
        self.view = view
        self.options = options
        self.book = Book()
        self.stack = contextlib.AsyncExitStack()
        self._owner: tuple[asyncio.Task[None], asyncio.Event] | None = None
        self.room: local_room.LocalRoom

    async def start(self, workers: int = 0) -> None:
        self.book = Book()
        deps = dependencies_of(self.view, self.book, **self.options)
        where = place.Place("g1", TOKEN, owns=True, socket=str(self.path), workers=workers)
        deps = dataclasses.replace(deps, place=where)
        up, stop = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with rooms.joined(deps) as admission:
                assert admission.own is not None
                self.room = admission.own
                running = asyncio.create_task(self.room.run())
                up.set()
                await stop.wait()
                running.cancel()
                await asyncio.wait({running})

        self._owner = asyncio.create_task(serve()), stop
        await up.wait()

    async def end(self) -> None:
        if self._owner is not None:
            task, stop = self._owner
            self._owner = None
            stop.set()
            await task

    @contextlib.asynccontextmanager
    async def worker(self, token: str = TOKEN, **options: Any) -> AsyncIterator[remote.RemoteRoom]:
        deps = dependencies_of(self.view, **{**self.options, **options})
        room = remote.RemoteRoom(deps, remote.unix(str(self.path)), token, "w")
        running = asyncio.create_task(room.run())
        try:
            yield room
        finally:
            running.cancel()
            await asyncio.wait({running})


@contextlib.asynccontextmanager
async def house(view: fleet.FleetView, **options: Any) -> AsyncIterator[House]:
    with tempfile.TemporaryDirectory() as folder:
        made = House(Path(folder), view, **options)
        await made.start()
        try:
            yield made
        finally:
            await made.end()


async def turn(room: waiting.Room, waiter: waiting.Waiter) -> waiting.Grant:
    return await asyncio.wait_for(room.wait(waiter), 5)


ONE = harness.make_view([harness.make_replica("r1", seats=1)])


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
        first = await asyncio.wait({turns := asyncio.create_task(turn(room, c))}, timeout=1)
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
            assert await asyncio.wait_for(reader.read(), 5) == b""
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


def test_rendezvous_moves_only_what_a_host_had() -> None:
    hosts = [fleet.Gateway(f"g{n}", f"h{n}:1") for n in range(4)]
    before = {model: ownership.owner(str(model), hosts) for model in range(400)}
    after = {model: ownership.owner(str(model), hosts[:3]) for model in range(400)}
    assert {host.gateway_id for host in before.values() if host} == {"g0", "g1", "g2", "g3"}
    assert all(after[model] == host for model, host in before.items() if host != hosts[3])
    assert ownership.owner("m", ()) is None


class Host:
    """A gateway process that owns queues and shares models."""

    def __init__(self, name: str, view: fleet.FleetView) -> None:
        self.name = name
        self.book = Book()
        self.deps = dependencies_of(view, self.book)
        self.address = ""
        where = place.Place(name, TOKEN, owns=True, listen="127.0.0.1:0", told=self._told)
        self.deps = dataclasses.replace(self.deps, place=where)
        self.source: ports.StaticFleet = self.deps.fleet
        self.admission: rooms.Admission

    def _told(self, address: str) -> None:
        self.address = address

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator["Host"]:
        async with rooms.joined(self.deps) as self.admission:
            tasks = [asyncio.ensure_future(run()) for run in self.admission.runs]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    @property
    def own(self) -> local_room.LocalRoom:
        assert self.admission.own is not None
        return self.admission.own


async def test_hosts_split_the_models_and_a_lost_host_moves_its_own() -> None:
    replica = harness.make_replica("r1", seats=1)
    view = harness.make_view([replica])
    async with Host("g1", view).up() as one, Host("g2", view).up() as two:
        gateways = tuple(fleet.Gateway(host.name, host.address) for host in (one, two))
        named = ownership.owner("chat", gateways)
        assert named is not None
        here, there = (two, one) if named.gateway_id == "g1" else (one, two)
        shared = dataclasses.replace(view, revision=2, gateways=gateways)
        for host in (one, two):
            host.source.set(shared)
        room = here.admission.room
        running = room.enter(ask("a"))
        grant = await turn(room, running)
        waits = room.enter(ask("b"))
        await harness.until(lambda: there.own.waiting("chat")["interactive"] == 1)
        assert here.own.loads.idle
        assert set(there.book.held) == {"a", "b"}
        waiting_task = asyncio.create_task(turn(room, waits))
        await asyncio.sleep(0)
        here.source.set(
            dataclasses.replace(view, revision=3, gateways=())
        )  # a new broker: no word yet
        await harness.until(lambda: here.own.view().revision == 3)
        assert there.own.waiting("chat")["interactive"] == 1
        left = tuple(gateway for gateway in gateways if gateway.gateway_id == here.name)
        here.source.set(dataclasses.replace(view, revision=4, gateways=left))
        await harness.until(lambda: here.own.waiting("chat")["interactive"] == 1)
        assert here.own.loads.total(ids.ReplicaId("r1")) == 1
        assert here.book.adopted == ["a"]
        await harness.until(lambda: there.own.loads.idle and not there.book.held)
        grant.close()
        room.leave(running, quota.Spent(1, 0, 2))
        (await waiting_task).close()
        room.leave(waits)
        assert here.own.loads.idle
        assert here.book.settled == [("a", quota.Spent(1, 0, 2)), ("b", quota.NOTHING)]


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


class Near:
    """A room of this process in the place of another host's."""

    def __init__(self, room: local_room.LocalRoom) -> None:
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._room, name)

    async def run(self) -> None:
        await asyncio.Event().wait()


def two_hosts(
    view: fleet.FleetView, book: Book | None = None
) -> tuple[split.SplitRoom, list[tuple[fleet.Gateway, ...]], local_room.LocalRoom]:
    """Return this host's way, the list of hosts (the model is the other's), and the other's room."""
    me = fleet.Gateway("me", "127.0.0.1:1")
    names = (fleet.Gateway(f"far{n}", "127.0.0.1:1") for n in range(100))
    far = next(one for one in names if ownership.owner("chat", [me, one]) == one)
    live: list[tuple[fleet.Gateway, ...]] = [(me, far)]
    own = local_room.LocalRoom(dependencies_of(view, book), lambda: 0.99)
    other = local_room.LocalRoom(dependencies_of(view), lambda: 0.0)
    made: Any = Near(other)
    return split.SplitRoom("me", own, lambda: live[0], lambda _: made), live, other


async def test_a_stream_that_moves_while_it_waits_keeps_its_version() -> None:
    view = harness.make_view(
        [harness.make_replica("r1", seats=1), harness.make_replica("r2", version="2")],
        weights={"1": 50, "2": 50},
    )
    room, live, other = two_hosts(view)
    waiter = room.enter(ask("a"))
    grant = await turn(room, waiter)
    assert grant.version == "1"
    grant.close()
    other.enter(ask("b", version="1"))
    room.again(waiter, grant.version)
    live[0] = live[0][:1]
    room.refresh()
    assert (await turn(room, waiter)).version == "1"
    room.leave(waiter)


async def test_a_refusal_after_a_move_is_told_as_what_it_is() -> None:
    view = harness.make_view([harness.make_replica("r1", seats=1)])
    room, live, other = two_hosts(view, Book())
    other.enter(ask("b"))
    waiter = room.enter(msgspec.structs.replace(ask("a"), team="poor"))
    live[0] = live[0][:1]
    room.refresh()
    with pytest.raises(errors.QuotaExceeded):
        await turn(room, waiter)
    room.leave(waiter)
    room.refresh()
    assert not other.waiting("chat")["interactive"]
