"""Slurm's shards for real: a lease asks for parts of a GPU, and the slots of one lease share that GPU."""

import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import cli, devcluster, rest, sbatch, tokens
from tests import realslurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[devcluster.Site]:
    """A cluster of one node with two GPUs of four shards each, and Slurm's accounting."""
    realslurm.require_slurm()
    folder = tmp_path_factory.mktemp("shards")
    try:
        yield devcluster.up(
            folder, nodes=1, gpus_per_node=2, shards_per_gpu=4, rest=True, name="sharded"
        )
    finally:
        devcluster.down(folder, purge=True)
        shutil.rmtree(folder, ignore_errors=True)


def run(on: devcluster.Site, *argv: str) -> str:
    env = {**os.environ, **on.env()}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def text_of(path: Path, what: str) -> str:
    """Return a file's text once it is there."""
    for _ in range(int(PATIENCE_S / 0.1)):
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{what}: nothing in {path}")


def spec(script: str, folder: Path, shards: int) -> slurm.JobSpec:
    return slurm.JobSpec(
        name="lease",
        script=f"#!/bin/bash\n{script}\n",
        partitions=("serve",),
        time_limit_s=300,
        output=str(folder / "job.log"),
        directory=str(folder),
        stamp=slurm.Stamp("sharded", ids.LeaseId(ids.short_id("l")), "serve", "root"),
        gpus_per_node=shards,
        gres="shard",
        cpus_per_node=4,
        memory_mb=100,
    )


def test_slots_of_a_lease_share_its_gpu_and_sacct_counts_shards(
    sharded: devcluster.Site, tmp_path: Path
) -> None:
    port = cli.CliClient(conf=Path(sharded.slurm_conf))
    steps = "\n".join(
        f"srun {' '.join(sbatch.srun_arguments('$SLURM_JOB_ID', gpus=1, cpus=1, gres='shard'))} "
        f'bash -c \'echo "$CUDA_VISIBLE_DEVICES $SLURM_STEP_ID" >{tmp_path}/step.{number}; '
        f"until [ -e {tmp_path}/step.0 ] && [ -e {tmp_path}/step.1 ]; do sleep 0.1; done' &"
        for number in range(2)
    )
    wait = f"wait\nuntil [ -e {tmp_path}/end ]; do sleep 0.1; done"
    first = port.submit(spec(f"{steps}\n{wait}", tmp_path, 3))
    try:
        said = [text_of(tmp_path / f"step.{n}", "a step").split() for n in range(2)]
        assert said[0][0] == said[1][0] != ""  # one GPU, both at once
        assert said[0][1] != said[1][1]
        (node,) = port.nodes()
        assert (node.gpus, dict(node.shared)) == (2, {"shard": 8})
    finally:
        (tmp_path / "end").touch()
    job_id = first.job_id
    found: tuple[slurm.JobRun, ...] = ()
    for _ in range(int(PATIENCE_S / 0.5)):
        found = port.accounting(job_id)
        if found and found[0].state is slurm.JobState.COMPLETED:
            break
        time.sleep(0.5)
    assert [(dict(one.shared), one.gpus) for one in found] == [({"shard": 3}, None)]
    key, user = sharded.jwt_key, sharded.rest_user
    over_rest = rest.RestClient(sharded.rest_url, user=user, token=tokens.from_key(key, user))
    try:
        (one,) = over_rest.accounting(job_id)
        assert (dict(one.shared), one.gpus, one.state) == ({"shard": 3}, None, found[0].state)
    finally:
        over_rest.close()


def test_a_lease_without_gpus_starts_beside_those_that_have_them(
    sharded: devcluster.Site, tmp_path: Path
) -> None:
    port = cli.CliClient(conf=Path(sharded.slurm_conf))
    tell = f'echo "gpus:${{CUDA_VISIBLE_DEVICES:-no}}" >{tmp_path}/told'
    bare = spec(tell, tmp_path, 0)
    with pytest.raises(slurm.SlurmRefused, match="must ask for GPUs"):
        port.submit(bare)
    port.submit(dataclasses.replace(bare, name="forebay-serve-cpu"))
    assert text_of(tmp_path / "told", "a lease on CPUs") in {"gpus:no\n", "gpus:NoDevFiles\n"}


def test_more_shards_than_a_gpu_has_are_refused_by_slurm_too(
    sharded: devcluster.Site, tmp_path: Path
) -> None:
    """So a profile of more than its `parts` is refused before (`document.Profile`)."""
    port = cli.CliClient(conf=Path(sharded.slurm_conf))
    with pytest.raises(slurm.SlurmError):
        port.submit(spec("sleep 60", tmp_path, 9))
