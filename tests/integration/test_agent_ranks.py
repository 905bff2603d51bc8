"""A replica over two nodes of a lease: its ranks meet, serve, and end together, whoever of them dies."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines import processes
from scheduler.contracts import frames
from scheduler.contracts.v1 import control_pb2 as pb
from tests.integration import lease_site

pytestmark = pytest.mark.timeout(90)
NODES = {"n1": "0", "n2": "0"}


@contextlib.asynccontextmanager
async def wide(folder: Path) -> AsyncIterator[lease_site.Site]:
    """Open a lease of two nodes of one GPU each."""
    async with lease_site.opened(folder, nodes=NODES) as site:
        yield site


def pids(site: lease_site.Site, rank: int, replica_id: str = "r-1") -> list[int]:
    """Return the processes of a rank."""
    slot = f"{site.lease_id}.s0" + (f".{rank}" if rank else "")
    return list(processes.marked({processes.REPLICA: replica_id, processes.SLOT: slot}))


def left(site: lease_site.Site, replica_id: str = "r-1") -> list[int]:
    """Return the processes of a replica; other tests, beside this one, call theirs the same."""
    return list(processes.marked({processes.REPLICA: replica_id, processes.LEASE: site.lease_id}))


async def answered(site: lease_site.Site, replica: pb.ReplicaReport, request_id: str) -> None:
    found = await site.ask(replica, request_id)
    assert found[-1].kind is frames.Kind.END


async def lost(site: lease_site.Site, replica_id: str = "r-1") -> str:
    """Return why a replica is lost, once it is."""
    report = await site.broker.until(lambda r: lease_site.state(r, replica_id) == "lost")
    found = lease_site.replica(report, replica_id)
    assert found is not None
    return found.reason


async def test_ranks_meet_serve_are_parked_and_stop_together(tmp_path: Path) -> None:
    async with wide(tmp_path) as site:
        site.want(lease_site.desired())
        replica = await site.serving()
        (slot,) = site.broker.last.slots
        assert (slot.gpus, slot.state, slot.node) == (2, "ready", "n1")
        assert list(replica.nodes) == ["n1", "n2"]
        await answered(site, replica, "q1")
        assert [len(pids(site, rank)) for rank in (0, 1)] == [1, 1]
        assert (tmp_path / "gpus" / "n2" / "0").exists(), "held on its node"

        site.want(lease_site.desired(asleep=True))
        await site.broker.until(lambda r: lease_site.state(r, "r-1") == "asleep")
        assert left(site) == []
        parked = lease_site.desired(asleep=True)
        site.want(parked, lease_site.desired("r-2"))
        await answered(site, await site.serving("r-2"), "q2")
        site.want(parked, lease_site.desired("r-2", run=False))
        await site.broker.until(lambda r: lease_site.state(r, "r-2") == "stopped")
        assert left(site, "r-2") == []
        site.want(lease_site.desired())
        woken = await site.serving()
        assert woken.incarnation == 2
        await answered(site, woken, "q3")

        site.want(close=True)
        assert await site.agent_exit() == 0
        await site.until_dead(5.0)
        last = site.broker.last
        assert [(one.state, one.gpus) for one in last.slots] == [("closed", 2)]


async def test_the_death_of_any_rank_loses_the_replica_and_leaves_nothing(tmp_path: Path) -> None:
    async with wide(tmp_path) as site:
        for rank, replica_id in ((1, "r-1"), (0, "r-2")):
            site.want(lease_site.desired(replica_id))
            await answered(site, await site.serving(replica_id), f"q{rank}")
            (victim,) = pids(site, rank, replica_id)
            os.kill(victim, signal.SIGKILL)
            reason = await lost(site, replica_id)
            assert left(site, replica_id) == []
            assert reason.startswith("rank 1 on n2: " if rank else "killed by SIGKILL")
            assert "killed by SIGKILL" in reason
        note = tmp_path / "gpus" / "n2" / "0"
        mine = {"pid": os.getpid(), "started": processes.start_time(os.getpid())}
        held = {**mine, "lease_id": "l-other", "slot_id": "s", "replica_id": "r-other"}
        note.write_text(json.dumps(held))
        site.want(lease_site.desired("r-3"))
        reason = await lost(site, "r-3")
        assert reason.startswith("rank 1 on n2: not started: GPU 0 is held by replica r-other")
        assert left(site, "r-3") == []
        assert site.broker.last.slots[0].state == "ready", "the slot stays through it all"


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_death_of_a_part_of_the_slot_ends_all_of_it(tmp_path: Path, rank: int) -> None:
    async with wide(tmp_path) as site:
        site.want(lease_site.desired())
        await site.serving()
        slot = f"{site.lease_id}.s0" + (f".{rank}" if rank else "")
        (supervisor,) = set(processes.marked({processes.SLOT: slot})) - set(pids(site, rank))
        os.kill(supervisor, signal.SIGKILL)
        report = await site.broker.until(lambda r: r.slots[0].state == "lost")
        (replica,) = report.slots[0].replicas
        assert replica.state == "lost"
        assert "its step ended with exit code -9" in replica.reason
        assert replica.reason.startswith("rank 1 on n2: ") == bool(rank)
        assert left(site) == []
        assert not [pid for pid in site.alive() if pid != site.agent.pid]


async def test_a_drain_cuts_nothing_and_sigterm_drains_before_the_ranks_go(
    tmp_path: Path,
) -> None:
    async with wide(tmp_path) as site:
        site.want(lease_site.desired(drain_s=20.0))
        replica = await site.serving()
        asked = asyncio.create_task(site.ask(replica, "q1", tokens=200))
        await site.broker.until(lambda r: r.slots[0].replicas[0].stats.interactive == 1)
        site.agent.send_signal(signal.SIGTERM)
        found = await asked
        assert found[-1].kind is frames.Kind.END
        assert await site.agent_exit() == 0
        await site.until_dead(5.0)
