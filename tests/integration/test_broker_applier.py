"""What the applier makes of a plan: what it writes down, closes, skips, and that one bad action is one."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import fleet, ids, slurm
from scheduler.core import actions, replicas
from scheduler.runtime import settings
from tests import brokersite
from tests.integration.test_broker_parking import PAIR, apply
from tests.unit.scheduler import plans


async def test_a_replica_over_nodes_has_a_slot_of_whole_nodes(tmp_path: Path) -> None:
    wide = dataclasses.replace(brokersite.CHAT, gpus=6)
    site = brokersite.Site(tmp_path, wide, options=settings.Settings(node_gpus=4))
    async with site.lead() as leader:
        await site.settle(leader)
        (entry,) = leader.live.leases.values()
        assert (entry.lease.gpus, entry.lease.whole_nodes) == (8, 2)
        assert [slot.gpus for slot in entry.slots.values()] == [8]
        more = actions.StartReplica(
            entry.lease.lease_id, None, wide.spec(), fleet.Role.SHARED, "one more"
        )
        (outcome,) = await apply(leader, more)
        assert outcome == f"skipped: lease {entry.lease.lease_id} has 0 GPUs left"


async def test_a_slot_closes_with_what_is_parked_in_it(tmp_path: Path) -> None:
    """It counted as full: a model that needed the whole lease waited for it for ever, its own plan undone."""
    site = brokersite.Site(tmp_path, *PAIR)
    async with site.lead() as leader:
        await site.settle(leader)
        (name,) = map(ids.ReplicaId, site.running())
        known = leader.live.replicas[name]
        lease_id, slot_id = known.replica.lease_id, known.replica.slot_id
        await apply(leader, actions.ParkReplica(name, 1.0, "swap"))
        await site.heard(leader)
        assert known.parked
        close = actions.CloseSlot(lease_id, slot_id, "a larger one needs its GPUs")
        assert await apply(leader, close) == ["done"]
        await site.settle(leader)
        assert name not in leader.live.replicas
        assert leader.live.failures == {}
        (entry,) = leader.live.leases.values()
        assert entry.slots[slot_id].state is replicas.SlotState.CLOSED
        assert "serving" in site.running().values()


async def test_one_action_that_fails_keeps_no_other_from_being_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of its plan was dropped, and of every plan after it."""
    site = brokersite.Site(tmp_path, *PAIR)
    async with site.lead() as leader:
        await site.settle(leader)
        (name,) = map(ids.ReplicaId, site.running())
        odd = actions.AdoptLease(plans.job(99, slurm.JobState.UNKNOWN), "nothing can be said of it")
        turn = actions.SetRole(name, fleet.Role.INTERACTIVE, "spike")
        with caplog.at_level(logging.ERROR):
            outcomes = await apply(leader, odd, turn)
        assert outcomes[0].startswith("failed: UnlistedEvent: ")
        assert outcomes[1] == "done"
        assert leader.live.replicas[name].wanted_role is fleet.Role.INTERACTIVE


async def test_a_replica_is_missed_only_by_who_was_told_of_it(tmp_path: Path) -> None:
    """While its start was written down another change moved the number that its agent was told without it."""
    site = brokersite.Site(tmp_path, *PAIR)
    async with site.lead() as leader:
        await site.settle(leader)
        (entry,) = leader.live.leases.values()
        (name,) = map(ids.ReplicaId, site.running())
        await apply(leader, actions.ParkReplica(name, 1.0, "swap"))
        await site.heard(leader)
        write = site.registry.holdings.save_wishes

        def beside(*given: Any, **named: Any) -> None:
            write(*given, **named)
            entry.revision += 1  # as a replica's end does, or an adapter's coming

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(site.registry.holdings, "save_wishes", beside)
            start = actions.StartReplica(
                entry.lease.lease_id,
                leader.live.replicas[name].replica.slot_id,
                PAIR[1].spec(),
                fleet.Role.BATCH,
                "swap",
            )
            assert await apply(leader, start) == ["done"]
        (fresh,) = (each for key, each in leader.live.replicas.items() if key != name)
        assert fresh.revision == entry.revision
