"""What was heard of a lease before a plan changed it does not undo that in the registry."""

import dataclasses
from pathlib import Path

from scheduler.contracts import fleet
from tests import brokersite


async def test_older_news_of_a_lease_do_not_go_over_what_a_plan_wrote(tmp_path: Path) -> None:
    """Times heard of a pending lease were written after its "running": it stayed pending in the registry."""
    site = brokersite.Site(tmp_path)
    async with site.lead() as leader:
        await site.settle(leader)
        (entry,) = leader.live.leases.values()
        running = entry.lease
        assert running.state is fleet.LeaseState.RUNNING
        older = dataclasses.replace(running, state=fleet.LeaseState.PENDING)
        leader.live.news_leases[running.lease_id] = older
        await leader.applier.flush()
        assert site.registry.holdings.load().leases == (running,)

        # Of one that has ended meanwhile only its end is news.
        ended = dataclasses.replace(running, state=fleet.LeaseState.ENDED, ended_us=7)
        leader.live.change_lease(ended, 0.0)
        await leader.applier._writes.save_lease(ended)
        leader.live.news_leases[running.lease_id] = older
        await leader.applier.flush()
        assert site.registry.holdings.load().leases == ()
