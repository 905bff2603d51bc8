"""What is done about leases leaves nothing behind."""

import asyncio
from typing import Any

from scheduler.contracts import clock, fleet, ids
from scheduler.runtime import entries, lease_acts, live, settings


def lease(name: str, kind: fleet.LeaseKind, state: fleet.LeaseState) -> fleet.Lease:
    return fleet.Lease(
        lease_id=ids.LeaseId(name), cluster="alpha", kind=kind, team="physics", state=state, gpus=4
    )


async def test_a_submission_that_is_cut_short_while_others_leave_leaves_no_task(
    fake_clock: clock.FakeClock,
) -> None:
    picture = live.Live(1, "alpha", entries.Pauses(1.0, 60.0), fake_clock.monotonic())
    leaving = lease("l-1", fleet.LeaseKind.BACKFILL, fleet.LeaseState.CLOSING)
    picture.leases[leaving.lease_id] = entries.LeaseEntry(leaving, since=0.0, connection=object())
    unused: Any = None
    acts = lease_acts.LeaseActs(picture, unused, unused, unused, settings.Settings(), fake_clock)
    wanted = lease("l-2", fleet.LeaseKind.SERVE, fleet.LeaseState.REQUESTED)
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(acts._given_way(wanted))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks() - before) > 1
    waiting.cancel()
    await asyncio.wait({waiting})
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    await acts.close(0.0)
