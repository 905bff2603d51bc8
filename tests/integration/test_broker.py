"""The broker end to end: Slurm, agents, registry and gateways, with time in the test's hand."""

from pathlib import Path

import pytest

from scheduler.contracts import clock, fleet
from scheduler.contracts import slurm as port
from scheduler.runtime import client
from tests import brokersite


@pytest.fixture
def site(tmp_path: Path) -> brokersite.Site:
    return brokersite.Site(tmp_path)


async def test_a_wanted_replica_comes_up_and_gateways_see_it(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (lease,) = leader.live.leases.values()
        assert lease.lease.state is fleet.LeaseState.RUNNING
        assert (lease.lease.gpus, lease.lease.slurm_job_id) == (4, "100")
        assert list(site.running().values()) == ["serving"]
        watcher = client.FleetClient(site.folder, "g1", clock.SystemClock())
        watcher.start()
        await watcher.changed(-1)
        view = watcher.view()
        await watcher.close()
        assert view is not None
        assert view.epoch == 1
        assert view.routes["chat"].weights == {"v1": 100}
        (replica,) = view.replicas
        assert (replica.state, replica.address) == (fleet.ReplicaState.SERVING, "127.0.0.1:9001")
        assert replica.slurm_job_id == "100"
        assert watcher.view() is view
