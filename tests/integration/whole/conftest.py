"""The installations that the tests of this package share."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_plugins import devcluster
from slurm_plugins.devcluster import accounts
from tests.integration.whole import running

SPOOL_MIB = 48  # two segments ahead for each of a dozen processes, several times over
USER = "nobody"  # a Unix user with an association
STRANGER = "daemon"  # one without


@pytest.fixture(scope="package")
def site_house(
    slurm_site: devcluster.Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[running.Running]:
    """An installation on the real cluster; `house` is how tests take it."""
    accounts.create(slurm_site, {"physics": [USER]}, [])
    slurm = {
        "conf": str(slurm_site.slurm_conf),
        "rest_url": slurm_site.rest_url,
        "rest_user": slurm_site.rest_user,
        "jwt_key_file": str(slurm_site.jwt_key),
        "account": "physics",
        "call_timeout_s": 3.0,
    }
    folder = tmp_path_factory.mktemp("whole")
    made = running.Running(folder, slurm, str(slurm_site.munge_socket), slurm_site.env())
    with _small_disk(made.state / "spool"):
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Put a folder on a file system of its own, so that a test can fill it."""
    folder.mkdir(parents=True)
    argv = ["mount", "-t", "tmpfs", "-o", f"size={SPOOL_MIB}m,mode=755", "forebay-test"]
    mounted = subprocess.run([*argv, str(folder)], capture_output=True, check=False)
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def house(site_house: running.Running) -> Iterator[running.Running]:
    """The installation at rest; it has to come to rest again after each test."""
    site_house.up()
    yield site_house
    site_house.settled()


@pytest.fixture
def key(house: running.Running) -> str:
    """An API key of team physics for every tier."""
    return house.key
