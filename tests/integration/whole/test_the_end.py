"""At the end nothing is left: no process, no Slurm job. The next test starts the installation anew."""

import signal

import pytest

from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_nothing_is_left(site_house: running.Running) -> None:
    site_house.up()
    assert clients.post(site_house, site_house.key, clients.chat(2)).status_code == 200
    jobs = site_house.slurm_jobs()
    assert len(jobs) == running.REPLICAS
    assert {"broker", "gateway", "batchd", "agent", "slot", "replica"} <= {
        each.part for each in site_house.processes()
    }
    assert site_house.down() == 128 + signal.SIGINT
    assert site_house.slurm_jobs() == []
    waiting.eventually(lambda: site_house.processes() == [], "the last process to end", 10)
    assert "Traceback" not in site_house.log()
