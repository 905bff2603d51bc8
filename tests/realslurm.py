"""The real Slurm cluster of a test session: started once, when the first test asks for it."""

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from slurm_plugins import cli, devcluster
from slurm_plugins.devcluster import daemons, processes
from tests import endings, services

ACCOUNTS = {"physics": ("alice",), "biology": ("bob",)}


def require_slurm() -> None:
    """Skip without Slurm's packages or root; fail in CI."""
    lacking = ", ".join(daemons.missing())
    services.require(not lacking, f"Slurm's packages ({lacking}): run .ci/debian-packages as root")
    services.require(os.geteuid() == 0, "root, to start Slurm's daemons")


@pytest.fixture(scope="session")
def slurm_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[devcluster.Site]:
    """Yield a cluster of 4 nodes with 4 pretend GPUs each, with accounting and REST.

    Tests share it: each ends the jobs that it submits (`slurm_at_rest`). Its daemons outlive who starts them.
    """
    require_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    down = [sys.executable, "-P", "-m", "forebay", "devcluster", "down", "--purge", "--folder"]
    with endings.afterwards([*down, folder]):
        yield devcluster.up(folder, accounts=ACCOUNTS)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm_at_rest(slurm_site: devcluster.Site) -> Iterator[devcluster.Site]:
    """Yield the cluster of the session without a job, and leave it so."""
    at_rest(slurm_site)
    yield slurm_site
    at_rest(slurm_site)


def at_rest(on: devcluster.Site) -> None:
    """End every job, and wait until Slurm has: one that still ends holds GPUs, and its stamp is adopted."""
    port = cli.CliClient(on.slurm_conf)
    for job in port.jobs():
        if not job.state.final:
            port.cancel(job.job_id)
    assert processes.wait_until(lambda: all(job.state.final for job in port.jobs()), 90.0)
