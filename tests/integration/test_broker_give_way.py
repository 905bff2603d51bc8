"""When a lease that is asked for in another's place goes to Slurm."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from scheduler.contracts import fleet, ports
from scheduler.core import actions
from scheduler.runtime import lease_acts
from tests import brokersite
from tests.integration.test_broker_scaling import ELASTIC, QUICK, demand


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_new_lease_goes_to_slurm_when_the_old_one_has_left_or_takes_too_long(
    tmp_path: Path, *, leaves: bool
) -> None:
    """Earlier, Slurm would preempt the old one itself, and see its end late."""
    site = brokersite.Site(
        tmp_path,
        ELASTIC,
        options=dataclasses.replace(
            QUICK, fleet_gpus=8, lend_every_s=0.0, min_run_s=0.0, rungs=(0, 3)
        ),
    )
    work = {"chat": ports.BatchWork(10_000, 2_560_000)}
    site.parts = dataclasses.replace(site.parts, batch_work=lambda: work)
    async with site.lead() as leader:
        for _ in range(20):
            await site.step(leader, 1.0)
        (lent,) = (
            lease_id
            for lease_id, entry in leader.live.leases.items()
            if entry.lease.kind is fleet.LeaseKind.BACKFILL
        )
        agent = site.agents[lent]
        agent.lingers = True
        before = len(site.slurm.submitted)
        for tick in range(10):
            leader.live.absorb_demand("g1", demand(40, 4, 100 * tick), site.clock.monotonic())
            await site.clock.advance(0.2)
            await site.heard(leader)
            made = await leader.tick()
            if any(isinstance(action, actions.CloseLease) for action in made.actions):
                break
        async with asyncio.timeout(10):
            while agent.report.closing != "asked":
                await leader.live.heard.wait()
        assert len(site.slurm.submitted) == before
        if leaves:
            await site.cut(leader, lent)
        else:
            await site.clock.advance(lease_acts.GIVE_WAY_S - 0.1)
            assert len(site.slurm.submitted) == before
            await site.clock.advance(0.2)
        async with asyncio.timeout(10):
            await leader.applier.settle()
        assert len(site.slurm.submitted) == before + 1
