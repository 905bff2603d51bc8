"""The links' ends: who may speak, which word is followed, and what happens when the peer is gone."""

import asyncio
import time

import grpc
import grpc.aio
import pytest

from engines import link
from engines.agent import server
from scheduler.contracts import fleet, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc

PATIENCE_S = 10.0


class Agent:
    """The agent's end, as far as slots see it."""

    def __init__(self) -> None:
        self.reports: list[pb.SlotReport] = []
        self.heard = asyncio.Event()
        self.desired = {"s": pb.SlotDesired(slot_id="s", epoch=1)}
        self.servicer = server.SlotLink("token", self._reported, self.desired.get)

    def _reported(self, report: pb.SlotReport) -> None:
        self.reports.append(report)
        self.heard.set()


def linked(
    address: str, taken: list[pb.SlotDesired], token: str = "token", slot_id: str = "s"
) -> "link.Link[pb.SlotReport, pb.SlotDesired]":
    ends: link.Ends[pb.SlotReport, pb.SlotDesired] = link.Ends(
        where=lambda: address,
        open_call=lambda channel: control_pb2_grpc.SlotLinkStub(channel).Connect,
        report=lambda: pb.SlotReport(slot_id=slot_id),
        take=taken.append,
    )
    return link.Link(ends, token, link.Pace(0.02, 0.1), "test")


async def until(check: list[pb.SlotDesired], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(check) < count:  # noqa: ASYNC110 - gRPC has no event for a test
            await asyncio.sleep(0.005)


async def test_desired_states_come_once_and_again_when_they_change() -> None:
    agent = Agent()
    listening, address = await server.listen(agent.servicer, "127.0.0.1")
    taken: list[pb.SlotDesired] = []
    kept = linked(address, taken)
    task = asyncio.create_task(kept.run())
    try:
        await until(taken, 1)
        agent.servicer.changed()
        agent.desired["s"] = pb.SlotDesired(slot_id="s", epoch=2)
        agent.servicer.changed()
        await until(taken, 2)
        assert [item.epoch for item in taken] == [1, 2]
        assert kept.connected
        before = len(agent.reports)
        began = time.monotonic()
        while len(agent.reports) < before + 3:
            agent.heard.clear()
            await agent.heard.wait()
        assert time.monotonic() - began < 2.0, "heartbeats come by themselves"
    finally:
        await listening.stop(None)
        task.cancel()
        await asyncio.wait({task})


async def test_the_last_word_is_read_before_the_link_ends() -> None:
    agent = Agent()
    read = asyncio.Event()
    said: list[str] = []

    def reported(report: pb.SlotReport) -> None:
        said.append(report.state)
        read.set()

    listening, address = await server.listen(
        server.SlotLink("token", reported, agent.desired.get), "127.0.0.1"
    )
    state = ["ready"]
    ends: link.Ends[pb.SlotReport, pb.SlotDesired] = link.Ends(
        where=lambda: address,
        open_call=lambda channel: control_pb2_grpc.SlotLinkStub(channel).Connect,
        report=lambda: pb.SlotReport(slot_id="s", state=state[0]),
        take=lambda _: None,
    )
    kept = link.Link(ends, "token", link.Pace(0.02, 0.1), "test")
    task = asyncio.create_task(kept.run())
    try:
        await asyncio.wait_for(read.wait(), PATIENCE_S)
        state[0] = "lost"
        assert await kept.farewell(PATIENCE_S)
        assert said[-1] == "lost", "taken, not only written"
        await asyncio.wait_for(task, PATIENCE_S)
    finally:
        await listening.stop(None)
        task.cancel()
        await asyncio.wait({task})


async def test_a_farewell_to_nobody_ends_in_time() -> None:
    ends: link.Ends[pb.SlotReport, pb.SlotDesired] = link.Ends(
        where=lambda: None,
        open_call=lambda channel: control_pb2_grpc.SlotLinkStub(channel).Connect,
        report=lambda: pb.SlotReport(slot_id="s"),
        take=lambda _: None,
    )
    kept = link.Link(ends, "token", link.Pace(0.02, 0.1), "test")
    task = asyncio.create_task(kept.run())
    assert not await kept.farewell(0.05)
    task.cancel()
    await asyncio.wait({task})


async def test_a_newer_call_of_a_slot_replaces_the_older() -> None:
    agent = Agent()
    listening, address = await server.listen(agent.servicer, "127.0.0.1")
    old: list[pb.SlotDesired] = []
    new: list[pb.SlotDesired] = []
    first = asyncio.create_task(linked(address, old).run())
    await until(old, 1)
    first.cancel()
    second = asyncio.create_task(linked(address, new).run())
    try:
        await until(new, 1)
        assert [item.epoch for item in new] == [1]
    finally:
        await listening.stop(None)
        second.cancel()
        await asyncio.wait({first, second})


async def test_a_wrong_token_is_refused_and_an_unknown_slot_waits() -> None:
    agent = Agent()
    listening, address = await server.listen(agent.servicer, "127.0.0.1")
    try:
        async with grpc.aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel:
            stub = control_pb2_grpc.SlotLinkStub(channel)
            call = stub.Connect(metadata=(("authorization", "Bearer wrong"),))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert agent.reports == []
        taken: list[pb.SlotDesired] = []
        stranger = asyncio.create_task(linked(address, taken, slot_id="x").run())
        async with asyncio.timeout(PATIENCE_S):
            await agent.heard.wait()
        assert taken == []
        stranger.cancel()
        await asyncio.wait({stranger})
    finally:
        await listening.stop(None)


async def test_it_comes_back_when_the_peer_does() -> None:
    agent = Agent()
    listening, address = await server.listen(agent.servicer, "127.0.0.1")
    taken: list[pb.SlotDesired] = []
    places: list[str | None] = [address]
    ends: link.Ends[pb.SlotReport, pb.SlotDesired] = link.Ends(
        where=lambda: places[0],
        open_call=lambda channel: control_pb2_grpc.SlotLinkStub(channel).Connect,
        report=lambda: pb.SlotReport(slot_id="s"),
        take=taken.append,
    )
    kept = link.Link(ends, "token", link.Pace(0.02, 0.1), "test")
    task = asyncio.create_task(kept.run())
    try:
        await until(taken, 1)
        places[0] = None
        await listening.stop(None)
        async with asyncio.timeout(PATIENCE_S):
            while kept.lost_at is None:  # noqa: ASYNC110 - gRPC has no event for a test
                await asyncio.sleep(0.005)
        listening, places[0] = await server.listen(agent.servicer, "127.0.0.1")
        await until(taken, 2)
        assert kept.lost_at is None
    finally:
        await listening.stop(None)
        task.cancel()
        await asyncio.wait({task})


async def test_a_peer_that_was_replaced_is_left_though_its_call_still_stands() -> None:
    """A leader that is stopped (SIGSTOP, a dead host) hangs up on nobody."""
    old, new = Agent(), Agent()
    stopped, first = await server.listen(old.servicer, "127.0.0.1")
    listening, second = await server.listen(new.servicer, "127.0.0.1")
    taken: list[pb.SlotDesired] = []
    places: list[str | None] = [first]
    ends: link.Ends[pb.SlotReport, pb.SlotDesired] = link.Ends(
        where=lambda: places[0],
        open_call=lambda channel: control_pb2_grpc.SlotLinkStub(channel).Connect,
        report=lambda: pb.SlotReport(slot_id="s"),
        take=taken.append,
    )
    new.desired["s"] = pb.SlotDesired(slot_id="s", epoch=2)
    kept = link.Link(ends, "token", link.Pace(0.02, 0.05), "test")
    task = asyncio.create_task(kept.run())
    try:
        await until(taken, 1)
        places[0] = None  # nobody is named for a moment: the old one may still be the one
        await asyncio.sleep(0.2)
        assert kept.connected
        places[0] = second
        await until(taken, 2)
        assert [item.epoch for item in taken] == [1, 2]
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
        assert task.cancelled()
    finally:
        await stopped.stop(None)
        await listening.stop(None)
        task.cancel()
        await asyncio.wait({task})


def test_specs_cross_the_wire_unchanged() -> None:
    spec = fleet.ReplicaSpec(
        "m",
        "2",
        fleet.EngineKind.VLLM,
        weights="/w",
        engine_args={"max-num-seqs": 8, "enforce-eager": True},
        adapters={"a": "/a"},
    )
    assert wire.spec_from_pb(wire.spec_to_pb(spec)) == spec
    with pytest.raises(ValueError, match="abacus"):
        wire.spec_from_pb(pb.ReplicaSpec(engine="abacus"))
