"""GPU-seconds on the real cluster: they add up by replica and minute, and a killed agent loses a second."""

import collections

import pytest

from accounting import books, gpu_sums, gpu_time, reconcile, reports, stepcost
from slurm_plugins import devcluster
from slurm_plugins.cli import CliClient
from tests.bench import gpu_hour
from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_a_killed_agents_lease_agrees_with_sacct_and_everything_adds_up(
    house: running.Running, key: str, slurm_site: devcluster.Site
) -> None:
    for _ in range(4):
        assert clients.post(house, key, clients.chat(20)).is_success
    lease_id = str(house.leases()[0]["lease_id"])
    (agent,) = (
        each
        for each in house.processes()
        if each.part == "agent" and any(lease_id in word for word in each.argv)
    )
    agent.kill()
    house.settled()
    records, port = books.Books(house.state), CliClient(slurm_site.slurm_conf)

    def judged() -> bool:
        (lease,) = _leases(records, lease_id)
        (found,) = reconcile.reconcile(port, [lease])
        assert found.agrees, found
        return True

    waiting.eventually(judged, "both books to agree")
    with records.reading() as reading:
        wanted = gpu_hour.expected(reading)
        table = gpu_sums.live(reading, 0, books.MAX_US, stepcost.Cost(1.0, 4.0))
    found: collections.Counter[gpu_hour.Key] = collections.Counter()
    for row in table.to_pylist():
        found[row["lease_id"], row["replica_id"], row["minute_us"]] += row["gpu_us"]
    assert found == wanted


def _leases(records: books.Books, lease_id: str) -> list[gpu_time.LeaseTime]:
    with records.reading() as reading:
        return reports.lease_times(reading, reports.Scope(), reports.Filter(jobs=(lease_id,)))
