"""The real Slurm cluster of a test session: started once, when the first test asks for it."""

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from slurm_plugins import devcluster
from slurm_plugins.devcluster import daemons
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

    Tests share it: each cancels the jobs that it submits. Its daemons outlive who starts them.
    """
    require_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    down = [sys.executable, "-P", "-m", "forebay", "devcluster", "down", "--purge", "--folder"]
    with endings.afterwards([*down, folder]):
        yield devcluster.up(folder, accounts=ACCOUNTS)
    shutil.rmtree(folder, ignore_errors=True)
