"""Case L7 on the real thing: slurmdbd is down for a while; states come from slurmctld, books wait."""

from collections.abc import Iterator

import pytest

from accounting import gpu_time, reconcile
from scheduler.contracts import slurm
from slurm_plugins import cli, devcluster, rest, tokens
from slurm_plugins.devcluster import processes
from slurm_plugins.devcluster import site as layout
from tests import realslurm
from tests.unit.accounting import samples

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


@pytest.fixture
def without_slurmdbd(slurm_at_rest: devcluster.Site) -> Iterator[devcluster.Site]:
    """The shared cluster with its slurmdbd ended; it is brought back."""
    site = slurm_at_rest
    processes.stop(layout.layout(site.folder), ["slurmdbd"])
    try:
        yield site
    finally:
        assert devcluster.up(site.folder, accounts=realslurm.ACCOUNTS) == site


@pytest.fixture(params=["cli", "rest"])
def port(
    request: pytest.FixtureRequest, without_slurmdbd: devcluster.Site
) -> Iterator[slurm.SlurmPort]:
    site = without_slurmdbd
    if request.param == "cli":
        yield cli.CliClient(site.slurm_conf)
        return
    client = rest.RestClient(
        site.rest_url, user=site.rest_user, token=tokens.from_key(site.jwt_key, site.rest_user)
    )
    yield client
    client.close()


def test_states_go_on_and_gpu_seconds_are_unreconciled_l7(port: slurm.SlurmPort) -> None:
    spec = slurm.JobSpec(
        name="lease",
        script="#!/bin/bash\nsleep 60\n",
        partitions=("serve",),
        time_limit_s=600,
        output="/dev/null",
        directory="/",
        environment={"PATH": "/usr/bin:/bin"},
        account="physics",
        memory_mb=100,
    )
    job_id = port.submit(spec).job_id
    assert port.states([job_id])[job_id] in (slurm.JobState.PENDING, slurm.JobState.RUNNING)
    assert job_id in {job.job_id for job in port.jobs()}
    with pytest.raises((slurm.SlurmUnavailable, slurm.AccountingOff)):
        port.accounting(job_id)
    leases = gpu_time.by_lease([samples.gpu(lease_id=f"l-{n}") for n in range(2)])
    books = reconcile.reconcile(port, leases)
    assert [(row.agrees, row.sacct_us) for row in books] == [(None, None)] * 2
    assert all(row.note.startswith("unreconciled: ") for row in books)
