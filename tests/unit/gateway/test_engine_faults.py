"""An engine that fails on a request: the request's fault if every engine fails on it, else the replica's."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from gateway import placing
from scheduler.contracts import clock, errors, frames
from tests.unit.gateway import harness
from tests.unit.gateway.test_room_rules import Book, ask, room
from tests.unit.gateway.test_trouble import http, two

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
    many = two(first, harness.hello, replica_attempts=100)
    async with many as (served, one, _), http(served) as session:
        assert (await session.post(CHAT, json=harness.chat_body())).status_code == 200
        asked = len(one.received)
        assert asked
        for _ in range(5):
            assert (await session.post(CHAT, json=harness.chat_body())).status_code == 200
        assert len(one.received) == asked


async def test_a_request_that_every_engine_fails_on_is_set_aside_in_clear_words() -> None:
    with tempfile.TemporaryDirectory() as name:
        async with (
            harness.FakeReplica(fails, "r1").listening() as one,
            harness.FakeReplica(fails, "r2").listening() as other,
        ):
            replicas = [one.replica(Path(name)), other.replica(Path(name))]
            async with (
                harness.gateway(harness.make_view(replicas)) as served,
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
                async with asyncio.timeout(0.9):  # a suspected replica is not asked for 1 s
                    answers = [await session.post(CHAT, json=harness.chat_body()) for _ in range(4)]
                assert {each.status_code for each in answers} == {200}


@pytest.mark.parametrize("kind", [RuntimeError, errors.NoReplica])
async def test_whatever_ends_an_entry_gives_back_what_it_took(
    kind: type[Exception], fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Book()
    made, _ = room(fake_clock, harness.make_replica("r1"), book=book)

    def breaks(name: str) -> None:
        raise kind("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(made, "_place", lambda *_: None)
        patch.setattr(made, "_pump", breaks)
        with pytest.raises(kind):
            made.enter(ask("a"))
    assert len(book.settled) == len(book.claims) == 1
    assert not any(made.waiting("chat").values())
    made.tick()  # nobody is woken who is not there
