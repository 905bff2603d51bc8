"""Batch enters a shared replica only while no interactive request waits."""

import pytest

from scheduler.contracts import clock, fleet, ids, requests
from tests.unit.gateway.test_room_rules import ask, room

BATCH = requests.Tier.BATCH
STATS = fleet.ReplicaStats(at_us=1, seats=4)


def replica(name: str, seats: int, role: fleet.Role = fleet.Role.SHARED) -> fleet.Replica:
    return fleet.Replica(
        replica_id=ids.ReplicaId(name),
        cluster="c1",
        lease_id=ids.LeaseId("l-1"),
        slot_id=ids.SlotId("l-1.s0"),
        slurm_job_id="4711",
        node="n1",
        spec=fleet.ReplicaSpec("chat", "1", fleet.EngineKind.SIMULATED, seats=seats),
        state=fleet.ReplicaState.SERVING,
        role=role,
        address="127.0.0.1:1",
        incarnation=1,
        stats=STATS,
    )


@pytest.mark.parametrize(("role", "enters"), [(fleet.Role.SHARED, False), (fleet.Role.BATCH, True)])
async def test_batch_waits_while_an_interactive_request_does(
    fake_clock: clock.FakeClock, role: fleet.Role, enters: bool
) -> None:
    """One needs four seats and three are free: lines took them, and slowed down whom it waited for.

    What is given to batch alone goes on: nobody waits for that.
    """
    made, _ = room(
        fake_clock,
        replica("r1", 4),
        replica("r2", 2, role),
    )
    first, other = made.enter(ask("a")), made.enter(ask("b"))
    four = made.enter(ask("four", seats=4))
    assert first.open is not None
    assert four.open is None
    line = made.enter(ask("line", BATCH))
    assert (line.open is not None) is enters
    for waiter in (first, other):
        made.leave(waiter)
    await fake_clock.advance(0)
    assert four.open is not None
    # Nobody waits any more: batch has what is left.
    assert line.open is not None
    for waiter in (four, line):
        made.leave(waiter)
    assert made.loads.idle


async def test_a_caller_who_gives_up_lets_batch_in(fake_clock: clock.FakeClock) -> None:
    made, _ = room(fake_clock, replica("r1", 4))
    first = made.enter(ask("a"))
    four = made.enter(ask("four", seats=4))
    line = made.enter(ask("line", BATCH))
    assert line.open is None
    made.leave(four)
    made.tick()  # some hundredths of a second later
    assert line.open is not None
    for waiter in (first, line):
        made.leave(waiter)
    assert made.loads.idle
