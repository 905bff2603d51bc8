"""Requests that were lost with a replica are tried apart: where, who waits, and what a batch line hears."""

import pytest

from gateway import local_room, local_waiter, waiting
from scheduler.contracts import clock, errors, ids, requests
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.admission_site import ask as far_ask
from tests.unit.gateway.admission_site import house, turn
from tests.unit.gateway.test_room_rules import ask, room

B = requests.Tier.BATCH
ONE, TWO = fleets.make_replica("r1"), fleets.make_replica("r2")


def where(waiter: local_waiter.LocalWaiter) -> str:
    return "" if waiter.open is None else waiter.open.replica.replica_id


def lose(at: local_room.LocalRoom, *lost: local_waiter.LocalWaiter) -> None:
    """Let a replica die with requests on it, of which each hears in its turn."""
    for waiter in lost:
        assert waiter.open is not None
        waiter.collect()
        waiter.open.close()
        at.again(waiter, lost=True)


def told(waiter: local_waiter.LocalWaiter) -> errors.ForebayError:
    with pytest.raises(errors.ForebayError) as caught:
        waiter.collect()
    return caught.value


async def test_people_lost_together_are_tried_one_after_the_other(
    fake_clock: clock.FakeClock,
) -> None:
    at, _ = room(fake_clock, ONE)
    one, other = at.enter(ask("one")), at.enter(ask("other"))
    lose(at, one, other)
    at.tick()
    assert (where(one), where(other)) == ("r1", "")
    newcomer, line = at.enter(ask("newcomer")), at.enter(ask("line", B))
    assert where(newcomer) == where(line) == ""
    assert one.open is not None
    one.open.prefilled()
    one.open.passed()
    assert one.asking.suspected == 0
    at.tick()
    assert (where(other), where(newcomer), where(line)) == ("r1", "", "")
    await fake_clock.advance(local_waiter.NEW_PATIENCE_S + 0.1)
    at.tick()
    assert (where(newcomer), where(line)) == (
        "r1",
        "",
    )  # a person waits a moment, a line as long as it takes
    at.leave(other)
    at.tick()
    assert where(line) == "r1"
    for waiter in (one, newcomer, line):
        at.leave(waiter)
    assert at.loads.idle
    assert not at._placer.suspects.tried


async def test_an_answer_that_was_lost_once_does_not_wait_for_long(
    fake_clock: clock.FakeClock,
) -> None:
    at, _ = room(fake_clock, ONE)
    one, other = at.enter(ask("one")), at.enter(ask("other"))
    lose(at, one, other)
    at.tick()
    assert (where(one), where(other)) == ("r1", "")
    await fake_clock.advance(local_waiter.PATIENCE_S + 0.1)
    at.tick()
    assert where(other) == "r1"
    lose(at, one, other)  # two suspects in one place: each is tried alone, and waits for that
    await fake_clock.advance(local_waiter.PATIENCE_S + 0.1)
    at.tick()
    assert sorted((where(one), where(other))) == ["", "r1"]
    guilty, innocent = (one, other) if where(one) else (other, one)
    lose(at, guilty)
    error = told(guilty)
    assert (error.code, error.retry_after_s) == ("replica_lost", None)
    assert "3 replicas were lost" in error.message
    assert "set aside" in error.message
    at.leave(guilty)
    at.tick()
    assert where(innocent) == "r1"


async def test_who_is_no_suspect_goes_where_none_is_tried(fake_clock: clock.FakeClock) -> None:
    at, _ = room(fake_clock, ONE, TWO)
    line = at.enter(ask("line", B, suspected=1))
    others = [at.enter(ask(f"n{n}")) for n in range(6)]
    suspect = at.enter(ask("suspect", B, suspected=1))
    assert {where(one) for one in others} == {"r1", "r2"} - {where(line)}
    assert where(suspect) == where(others[0])


async def test_a_batch_line_hears_what_part_it_had(fake_clock: clock.FakeClock) -> None:
    at, _ = room(fake_clock, ONE)
    lines = [at.enter(ask(name, B)) for name in ("one", "other")]
    lose(at, *lines)
    for line in lines:
        error = told(line)
        assert isinstance(error, errors.ReplicaLost)
        assert (error.blame, error.retry_after_s) == (errors.Blame.SHARED, 1.0)
        assert error.openai()[errors.BLAME_FIELD] == "shared"
        at.leave(line)
    beside = at.enter(ask("beside", B))
    assert beside.open is not None
    beside.open.prefilled()
    await fake_clock.advance(1.0)
    suspect = at.enter(ask("suspect", B, suspected=1))
    lose(at, beside, suspect)
    blames = [told(line) for line in (beside, suspect)]
    assert [getattr(each, "blame", None) for each in blames] == [
        errors.Blame.NONE,
        errors.Blame.ALONE,
    ]
    assert [each.retry_after_s for each in blames] == [1.0, None]


async def test_a_worker_of_another_process_hears_the_same() -> None:
    async with house(fleets.make_view([ONE])) as made, made.worker() as far:
        await harness.until(lambda: far.connected)
        line, person = (
            far.enter(far_ask("line", B, batch=requests.BatchRef(ids.BatchJobId(1), "c", lost=1))),
            far.enter(far_ask("person")),
        )
        grants: list[waiting.Grant] = [await turn(far, line)]
        grants[0].passed()
        grants.append(await turn(far, person))
        assert line.asking.suspected == 0
        for waiter, grant in zip((line, person), grants, strict=True):
            grant.close()
            far.again(waiter, lost=True)
        with pytest.raises(errors.ReplicaLost) as caught:
            await turn(far, line)
        assert caught.value.blame is errors.Blame.SHARED
        assert person.asking.suspected == 1
        last = await turn(far, person)
        last.close()
        far.again(person, lost=True)
        with pytest.raises(errors.ReplicaLost, match="set aside") as caught:
            await turn(far, person)
        assert caught.value.blame is None
