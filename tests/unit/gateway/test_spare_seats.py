"""Requests that take spare seats alone: refused where anybody waits, told to leave, and on no quota."""

import asyncio

import msgspec
import pytest

from scheduler.contracts import errors, ids
from tests.unit.gateway import fleets, harness
from tests.unit.gateway.admission_site import B, ask, house, turn

TWO = fleets.make_view([fleets.make_replica("r1", seats=2, reserved_seats=1)])


async def test_over_a_link_too() -> None:
    spare = msgspec.structs.replace(ask("s", B), spare=True)
    async with house(TWO) as made, made.worker() as room:
        await harness.until(lambda: room.connected)
        copy = room.enter(spare)
        grant = await turn(room, copy)
        assert made.book.held == {}
        ended = asyncio.ensure_future(room.wait(copy))
        running = [room.enter(ask(name)) for name in ("a", "b")]
        for one in running:
            await turn(room, one)
        await asyncio.sleep(0.05)
        assert not ended.done()  # callers do not wait for what batch would give up at once
        waits = room.enter(ask("c"))
        with pytest.raises(errors.Shed):
            await asyncio.wait_for(ended, 10)
        grant.close()
        room.leave(copy)
        late = room.enter(msgspec.structs.replace(spare, request_id="t"))
        with pytest.raises(errors.Shed):  # somebody waits
            await turn(room, late)
        room.leave(late)
        for one in (*running, waits):
            room.leave(one)
        await harness.until(lambda: made.room.loads.idle and not made.book.held)
        assert made.room.loads.total(ids.ReplicaId("r1")) == 0
