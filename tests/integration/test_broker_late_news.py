"""What is heard while a plan is written down does not undo what the plan wrote."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import fleet
from scheduler.runtime.registry import holdings
from tests import brokersite


async def test_a_poll_that_answers_while_a_lease_is_written_down_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry said "pending" for ever: the times of a lease were heard just before its new state."""
    site = brokersite.Site(tmp_path)
    real = holdings.Holdings.save_lease
    polled: list[fleet.LeaseState] = []
    async with site.lead() as leader:
        loop = asyncio.get_running_loop()

        def meanwhile(self: Any, epoch: int, lease: fleet.Lease, at_us: int) -> None:
            entries = list(leader.live.leases.values())
            if lease.state is fleet.LeaseState.RUNNING and not polled:
                polled.append(entries[0].lease.state)
                asyncio.run_coroutine_threadsafe(leader.poller.poll(), loop).result(10)
            real(self, epoch, lease, at_us)

        monkeypatch.setattr(holdings.Holdings, "save_lease", meanwhile)
        for _ in range(3):  # no agent comes: it is Slurm that says that the lease runs
            await site.clock.advance(2.1)
            await leader.poller.poll()
            await leader.tick()
            await leader.applier.settle()
            await leader.applier.flush()
            site.slurm.start_all()
        (entry,) = leader.live.leases.values()
        assert entry.lease.state is fleet.LeaseState.RUNNING
        (kept,) = site.registry.holdings.load().leases
        assert kept.state is fleet.LeaseState.RUNNING
    assert polled == [fleet.LeaseState.PENDING]
