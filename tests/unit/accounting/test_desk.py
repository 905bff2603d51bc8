"""Reports at once: a heavy one takes its places and no others, and who waits too long is told what to do."""

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import fastapi
import pytest
from fastapi import testclient

from accounting import answers, books, desk
from scheduler.contracts import errors


async def test_everybody_has_places_of_their_own() -> None:
    places = desk.Desk(at_once=3, each=2, wait_s=0)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(places.place("red ann"))
        with pytest.raises(errors.Busy, match="2 of your reports are under way: ask again"):
            await held.enter_async_context(places.place("red ann"))
        await held.enter_async_context(places.place("blue bob"))
        with pytest.raises(errors.Busy, match="others' reports are under way") as raised:
            await held.enter_async_context(places.place("blue joe"))
        assert raised.value.retry_after_s == 1
    async with places.place("red ann"), places.place("red ann"), places.place("blue joe"):
        pass
    assert not places._own


async def test_who_waits_gets_the_place_that_is_given_back() -> None:
    places = desk.Desk(at_once=1, each=1, wait_s=60)
    done: list[str] = []

    async def report(who: str, hold: asyncio.Event) -> None:
        async with places.place(who):
            await hold.wait()
            done.append(who)

    hold, go = asyncio.Event(), asyncio.Event()
    go.set()
    first = asyncio.create_task(report("a", hold))
    await asyncio.sleep(0)
    second = asyncio.create_task(report("b", go))
    gone = asyncio.create_task(report("c", go))
    await asyncio.sleep(0)
    gone.cancel()
    hold.set()
    await asyncio.gather(first, second)
    assert done == ["a", "b"]
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert not places._own


async def test_a_crowd_is_refused_at_once() -> None:
    places = desk.Desk(at_once=1, each=1, wait_s=60)
    async with places.place("a"):
        waiting = [asyncio.create_task(_once(places, f"u{number}")) for number in range(100)]
        await asyncio.sleep(0)
        with pytest.raises(errors.Busy, match="too many reports wait here"):
            await _once(places, "late")
    await asyncio.gather(*waiting)


async def _once(places: desk.Desk, who: str) -> None:
    async with places.place(who):
        pass


def test_a_reading_that_takes_too_long_is_ended_in_one_line(tmp_path: Path) -> None:
    records = books.Books(tmp_path, at_most_s=0.05)
    app = fastapi.FastAPI()

    def heavy() -> dict[str, Any]:
        with records.reading() as reading:
            rows = reading.query("SELECT count(*) FROM range(1000000000000) WHERE range % 7 = 3")
            return {"rows": rows}

    @app.get("/")
    async def _heavy() -> fastapi.Response:
        return await answers.answered(heavy)

    answer = testclient.TestClient(app).get("/")
    assert answer.status_code == 504
    assert "takes too long: ask for a shorter window" in answer.json()["error"]["message"]


def test_a_reading_in_time_is_not_interrupted(tmp_path: Path) -> None:
    before = threading.active_count()
    with books.Books(tmp_path, at_most_s=3600).reading() as reading:
        assert reading.query("SELECT 1 AS a") == [{"a": 1}]
    assert threading.active_count() == before
