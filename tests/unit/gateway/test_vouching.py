"""A node that dies without a word: its streams go elsewhere when the fleet knows, not after long silence."""

import dataclasses
import math
import socket

import pytest

from gateway import hop, probing, vouching
from scheduler.contracts import fleet, ids
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.asking import http, two
from tests.unit.gateway.test_hop import BEGIN, answering, piece, taker
from tests.unit.gateway.test_survival import BEGIN as PROMPT
from tests.unit.gateway.test_survival import goes_on, text, token

CHAT = "/v1/chat/completions"
R1 = (ids.ReplicaId("r1"), 1)


def view(*replicas: fleet.Replica, epoch: int = 1) -> fleet.FleetView:
    return dataclasses.replace(fleets.make_view(replicas), epoch=epoch)


def test_what_the_fleet_says_of_a_replica() -> None:
    one, other = fleets.make_replica("r1"), fleets.make_replica("r2")
    said = vouching.Vouching()
    assert said.silence_s(R1) == math.inf  # nobody has said anything
    said.see(view(one, other))
    assert said.silence_s(R1) == math.inf
    said.see(view(other))
    assert said.silence_s(R1) == vouching.QUIET_S
    said.see(view(one, other))
    assert said.silence_s(R1) == math.inf
    said.see(view(dataclasses.replace(one, incarnation=2)))
    assert said.silence_s(R1) == 0.0
    for state, limit_s in (
        (fleet.ReplicaState.LOST, 0.0),
        (fleet.ReplicaState.DRAINING, math.inf),
        (fleet.ReplicaState.WARM, vouching.QUIET_S),  # it answers nobody
        (fleet.ReplicaState.SERVING, math.inf),
    ):
        said.see(view(dataclasses.replace(one, state=state)))
        assert said.silence_s(R1) == limit_s
    assert said.silence_s((R1[0], 2)) == math.inf  # newer than the view


def test_another_leader_that_has_not_heard_of_all_yet_ends_nothing() -> None:
    said = vouching.Vouching()
    said.see(view(fleets.make_replica("r1")))
    said.see(view(epoch=2))
    assert said.silence_s(R1) == math.inf


async def silent(received: harness.Received, out: harness.Out) -> None:
    """Send ``Hello`` and then nothing, as a node whose power fails."""
    await out.send(PROMPT, harness.data(harness.chat_event({"role": "assistant", "content": ""})))
    await out.send(token("Hel", 7), token("lo", 8, ahead=(9,)))
    await out.gone()


STATES = {"lost": fleet.ReplicaState.LOST, "answers nobody": fleet.ReplicaState.WARM}


@pytest.mark.parametrize("how", [*STATES, "gone from the view"])
async def test_a_stream_goes_on_elsewhere_as_soon_as_the_fleet_has_lost_its_replica(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vouching, "QUIET_S", 0.05)
    async with two(silent, goes_on) as (served, one, _):
        async with (
            http(served) as session,
            session.stream("POST", CHAT, json=harness.chat_body(stream=True)) as answer,
        ):
            lines = answer.aiter_lines()
            said = ""
            while "lo" not in text(said):
                said += await anext(lines) + "\n"
            before = served.fleet.view()
            assert before is not None
            replicas = tuple(
                dataclasses.replace(each, state=STATES[how])
                for each in before.replicas
                if each.replica_id == one.name and how in STATES
            ) + tuple(each for each in before.replicas if each.replica_id != one.name)
            served.fleet.set(dataclasses.replace(before, revision=9, replicas=replicas))
            async for line in lines:
                said += line + "\n"
        assert text(said) == "Hello world"
        assert "error" not in said
        await served.idle()


async def test_an_answer_that_ends_cleanly_without_its_last_frame_has_broken_off() -> None:
    """The connection stays open: nothing else would tell before the silence is too long."""
    answer, connection, _ = answering()
    connection.data_received(BEGIN + piece(1) + b"0\r\n\r\n")
    got, take = taker()
    with pytest.raises(hop.Broken, match="without its last frame"):
        await answer.each(take)
    assert got == [1]


async def test_a_connection_to_a_doubted_replica_that_speaks_is_believed() -> None:
    answer, connection, transport = answering()
    pool = connection._pool
    pool._busy.add(connection)
    connection.owner = R1
    pool.vouching.see(view(fleets.make_replica("r1")))
    pool.vouching.see(view())
    pool.doubt()
    assert not transport.aborted
    connection.heard -= vouching.QUIET_S + 0.1
    pool.doubt()
    assert transport.aborted
    with pytest.raises(hop.Broken, match="fleet"):
        await answer.head()


def test_a_connection_is_probed_by_the_kernel() -> None:
    with socket.socket() as raw:
        probing.Probes(7, 4, 1.5).apply(raw)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 7
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


def test_a_socket_of_this_machine_is_not_probed() -> None:
    """It knows no probes, and to set them raised in each connection."""
    with socket.socket(socket.AF_UNIX) as raw:
        probing.Probes().apply(raw)
        assert not raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
