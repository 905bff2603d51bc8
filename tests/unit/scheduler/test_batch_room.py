"""A replica that says how much batch it would let in is believed; what came and went since is counted in."""

import pytest

from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, room, routing
from tests.unit.scheduler import test_routing as made

B, P = requests.Tier.BATCH, requests.Tier.INTERACTIVE


def left_at(known: routing.Situation) -> int:
    (member,) = known.fleet.members()
    return room.batch_room(member, 0.1)


@pytest.mark.parametrize(("told", "left"), [(-1, 5), (0, -2), (3, 1), (8, 5)])
def test_the_smaller_of_its_word_and_the_seats_counts(told: int, left: int) -> None:
    """8 seats, 1 reserved; two lines were sent since it spoke."""
    loads = load.Loads()
    stats = fleet.ReplicaStats(at_us=1, seats=8, batch_room=told)
    known = made.situation(made.replica("r1", stats=stats), loads=loads)
    made.fill(loads, "r1", 2, B)
    assert left_at(known) == left


def test_a_line_that_ended_since_leaves_its_room_to_the_next() -> None:
    loads = load.Loads()
    (line,) = made.fill(loads, "r1", 1, B)
    stats = fleet.ReplicaStats(at_us=1, seats=8, batch=1, batch_room=0)
    known = made.situation(made.replica("r1", stats=stats), loads=loads)
    assert left_at(known) == 0
    line.close()
    assert left_at(known) == 1
    loads.open("chat", ids.ReplicaId("r1"), P)
    assert left_at(known) == 0
