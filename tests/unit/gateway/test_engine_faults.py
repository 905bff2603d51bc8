"""An engine that fails on a request: the request's fault if every engine fails on it, else the replica's."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from gateway import placing
from scheduler.contracts import clock, errors, frames
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.asking import http, two
from tests.unit.gateway.test_room_rules import Book, ask, room

CHAT = "/v1/chat/completions"


async def fails(received: harness.Received, out: harness.Out) -> None:
    await out.json(500, {"error": {"message": "odd", "code": 500}})


async def fails_in_frames(received: harness.Received, out: harness.Out) -> None:
    told = errors.EngineFailed("an assertion in the sampler")
    await out.error(frames.Error(told.code, told.message, told.status))


@pytest.mark.parametrize("first", [fails, fails_in_frames])
async def test_a_replica_that_fails_where_another_succeeds_is_suspect(
    first: harness.Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "SUSPECT_S", 60.0)
    async with two(first, harness.hello) as (served, one, _), http(served) as session:
        assert (await session.post(CHAT, json=harness.chat_body())).status_code == 200
        asked = len(one.received)
        assert asked == 1  # what failed there goes elsewhere
        for _ in range(5):
            assert (await session.post(CHAT, json=harness.chat_body())).status_code == 200
        assert len(one.received) == asked


async def test_a_request_that_every_engine_fails_on_is_set_aside_in_clear_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "SUSPECT_S", 600.0)
    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(fails, "r1").listening() as one,
            harness.FakeReplica(fails, "r2").listening() as other,
        ):
            replicas = [one.replica(Path(name)), other.replica(Path(name))]
            async with (
                harness.gateway(fleets.make_view(replicas)) as served,
                http(served) as session,
            ):
                answer = await session.post(CHAT, json=harness.chat_body())
                assert answer.status_code == 502
                error = answer.json()["error"]
                assert error["code"] == errors.EngineFailed.code
                assert "engines failed on this request 2 times" in error["message"]
                assert "set aside" in error["message"]
                assert "retry-after" not in answer.headers
                for fake in (one, other):
                    fake.script = harness.hello
                async with asyncio.timeout(60):  # a suspected replica would not be asked
                    answers = [await session.post(CHAT, json=harness.chat_body()) for _ in range(4)]
                assert {each.status_code for each in answers} == {200}


@pytest.mark.parametrize("kind", [RuntimeError, errors.NoReplica])
async def test_whatever_ends_an_entry_gives_back_what_it_took(
    kind: type[Exception], fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Book()
    made, _ = room(fake_clock, fleets.make_replica("r1"), book=book)

    def breaks(name: str) -> None:
        raise kind("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(made._turns, "at_once", lambda *_: False)
        patch.setattr(made._turns, "give", breaks)
        with pytest.raises(kind):
            made.enter(ask("a"))
    assert len(book.settled) == len(book.claims) == 1
    assert not any(made.waiting("chat").values())
    made.tick()  # nobody is woken who is not there


async def test_what_failed_on_an_engine_waits_for_another_and_holds_up_nobody(
    fake_clock: clock.FakeClock,
) -> None:
    """It goes back to the same replica only where there is no other."""
    one, two_ = fleets.make_replica("r1", seats=2), fleets.make_replica("r2", seats=1)
    made, source = room(fake_clock, one, two_)
    sits = made.adopt(ask("sits"), two_, "1")
    failed = made.enter(ask("failed"))
    assert failed.open is not None
    assert failed.open.replica.replica_id == "r1"
    failed.open.close()
    made.again(failed, avoid="r1")
    other = made.enter(ask("other", team="other"))
    assert failed.open is None  # r2 is busy, and r1 has failed on it
    assert other.open is not None
    assert other.open.replica.replica_id == "r1"
    made.leave(sits)
    made.tick()
    assert failed.open is not None
    assert failed.open.replica.replica_id == "r2"
    failed.open.close()
    source.set(fleets.make_view([one], revision=2, max_context=65536))
    made.tick()
    made.again(failed, avoid="r1")
    assert failed.open is not None
    assert failed.open.replica.replica_id == "r1"  # there is no other
    made.leave(failed)
    made.leave(other)
    assert made.loads.idle
