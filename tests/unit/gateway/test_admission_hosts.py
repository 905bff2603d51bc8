"""Hosts that split the models: which owns which, and what becomes of requests when one goes."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway import local_room
from gateway.admission import ownership, place, rooms, split
from scheduler.contracts import errors, fleet, ids, ports, quota
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.admission_site import (
    ONE,
    TOKEN,
    Book,
    ask,
    dependencies_of,
    turn,
)


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
    replica = fleets.make_replica("r1", seats=1)
    view = fleets.make_view([replica])
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
    view = fleets.make_view(
        [fleets.make_replica("r1", seats=1, version="2"), fleets.make_replica("r2")],
        weights={"1": 50, "2": 50},
    )
    room, live, other = two_hosts(view)
    waiter = room.enter(ask("a"))
    grant = await turn(room, waiter)
    assert grant.version == "2"
    grant.close()
    other.enter(ask("b", version="2"))
    room.again(waiter, grant.version)
    live[0] = live[0][:1]
    room.refresh()
    assert (await turn(room, waiter)).version == "2"
    room.leave(waiter)


async def test_a_refusal_after_a_move_is_told_as_what_it_is() -> None:
    view = fleets.make_view([fleets.make_replica("r1", seats=1)])
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


async def test_a_request_is_cancelled_from_a_host_that_never_heard_of_its_model() -> None:
    """Nobody can tell from an id whose queue it is in: every gateway is asked."""
    room, _, other = two_hosts(ONE)
    ended: list[str] = []
    room.hear(ended.append)
    other.enter(ask("a"))
    assert not await room.cancel("a", "physics", "bob")
    assert await room.cancel("a", "physics", "ann")
    assert ended == ["a"]
