"""Whatever becomes of the requests in a waiting room, nothing stays counted on any replica."""

import asyncio
import contextlib
import dataclasses
import random

import pytest

from gateway import local_waiter
from scheduler.contracts import clock, errors, fleet, ids, quota, requests
from tests.unit.gateway import fleets
from tests.unit.gateway.test_room_rules import ask, room


@pytest.mark.parametrize("seed", range(12))
async def test_the_load_returns_to_zero_through_refusals_losses_and_cancellations(
    seed: int,
) -> None:
    draws, time = random.Random(seed), clock.FakeClock()
    replicas = [fleets.make_replica(f"r{n}", seats=draws.randint(1, 3)) for n in range(3)]
    made, source = room(time, *replicas, queue_interactive=8, queue_standard=8, queue_batch=8)
    there: list[local_waiter.LocalWaiter] = []
    waits: list[asyncio.Task[object]] = []
    dispatched = 0
    for step in range(150):
        kind = draws.choice(
            ["enter"] * 4 + ["leave"] * 2 + ["full", "lost", "cancel", "view", "time", "adopt"]
        )
        running = [one for one in there if one.open is not None]
        if kind == "enter":
            asked = ask(
                draws.choice([f"q{step}", f"q{step // 2}"]),  # a link that was lost brings one twice
                draws.choice(list(requests.Tier)), draws.choice("ab"),
                seats=draws.choice([1, 1, 2]), chars=draws.choice([0, 4000]),
                adapter=draws.choice([None, "poet"]),
            )  # fmt: skip
            with contextlib.suppress(errors.ForebayError):
                there.append(made.enter(asked))
        elif kind == "adopt":
            there.append(made.adopt(ask(f"q{step}"), draws.choice(replicas), "1"))
        elif kind == "leave" and there:
            gone = there.pop(draws.randrange(len(there)))
            made.leave(gone, draws.choice([quota.NOTHING, quota.Spent(100, 20, 30)]))
        elif kind in {"full", "lost"} and running:
            one = draws.choice(running)
            grant = one.open
            assert grant is not None
            if kind == "full":
                made.full(grant.replica, one.asking.tier)
            else:
                made.suspect(grant.replica)
            grant.close()
            made.again(one)
        elif kind == "cancel" and there:
            one = draws.choice(there)
            waits.append(asyncio.ensure_future(made.wait(one)))
            await asyncio.sleep(0)
            waits[-1].cancel()
        elif kind == "view":
            kept = [each for each in replicas if draws.random() < 0.7]
            stats = fleet.ReplicaStats(at_us=step + 2, seats=3)
            fresh = [
                dataclasses.replace(each, stats=stats, incarnation=draws.choice([1, 2]))
                for each in kept
            ]
            source.set(fleets.make_view(fresh, revision=step + 2, max_context=65536))
            made.tick()
        elif kind == "time":
            await time.advance(draws.choice([0.1, 2.0]))
            made.tick()
        dispatched += sum(one.open is not None for one in there)
    assert dispatched  # else nothing was counted
    for one in there:
        made.leave(one)
        made.leave(one)
    await asyncio.gather(*waits, return_exceptions=True)
    assert made.loads.idle
    for name in ("r0", "r1", "r2"):
        assert made.loads.at(ids.ReplicaId(name)).idle
    assert made.loads.by_tier("chat") == dict.fromkeys(map(str, requests.Tier), 0)
