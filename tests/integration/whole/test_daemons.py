"""Slurm's daemons and agents are killed with SIGKILL under load: nothing is lost or counted twice."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from slurm_plugins import devcluster
from tests import realslurm
from tests.integration.whole import drills, running, test_losses, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@contextlib.contextmanager
def mended(site: devcluster.Site) -> Iterator[None]:
    """Bring back whatever of the cluster has died."""
    try:
        yield
    finally:
        devcluster.up(site.folder, accounts=realslurm.ACCOUNTS)


def answers(house: running.Running) -> bool:
    """Return whether the broker says that Slurm answers."""
    return test_losses.slurm_word(house) == "answers"


def test_slurmctld_killed(house: running.Running, key: str, slurm_site: devcluster.Site) -> None:
    """Everything inside leases goes on, a lost replica is replaced in its slot, no lease is closed."""
    leases, jobs = test_losses.held(house)[1], house.slurm_jobs()
    load = drills.Load(house, key)
    with mended(slurm_site):
        os.kill(drills.daemon(slurm_site, "slurmctld"), signal.SIGKILL)
        waiting.eventually(lambda: not answers(house), "the broker to notice")
        victim = load.rows()[0]["replica_id"]
        house.replica_process(victim).kill()
        load.whole()
        test_losses.answered(house, key)
        load.job.finished()
        waiting.eventually(
            lambda: len(house.replicas()) == running.REPLICAS, "a replica in the slot of the lost"
        )
        assert {lease["state"] for lease in house.leases()} == {"running"}
    waiting.eventually(lambda: answers(house), "the broker to notice")
    house.settled()
    assert test_losses.held(house)[1] == leases
    assert house.slurm_jobs() == jobs


@pytest.mark.long
def test_slurmdbd_killed(house: running.Running, key: str, slurm_site: devcluster.Site) -> None:
    """Only the comparison with sacct waits; leases come and go, and agree with sacct afterwards."""
    load = drills.Load(house, key)
    lease_id, job_id = load.rows()[0]["lease_id"], load.rows()[0]["slurm_job_id"]
    with mended(slurm_site):
        os.kill(drills.daemon(slurm_site, "slurmdbd"), signal.SIGKILL)
        subprocess.run(["scancel", job_id], env=house.env, check=True)
        load.over()
        assert drills.job_state(house, lease_id)["state"] == "ended"
    drills.books_agree(house, lease_id)


def test_slurmd_killed(house: running.Running, key: str, slurm_site: devcluster.Site) -> None:
    """A node's daemon is not its jobs: they go on without it, and it finds them again."""
    before, jobs = test_losses.held(house), house.slurm_jobs()
    load = drills.Load(house, key)
    (node,) = next(
        lease["nodes"]
        for lease in house.leases()
        if lease["lease_id"] == load.rows()[0]["lease_id"]
    )
    with mended(slurm_site):
        os.kill(drills.daemon(slurm_site, f"slurmd-{node}"), signal.SIGKILL)
        load.over(at_once=True)
    house.settled()
    assert test_losses.held(house) == before
    assert house.slurm_jobs() == jobs


@pytest.mark.long
@pytest.mark.parametrize("step", ["batch", "0"])
def test_slurmstepd_killed(
    house: running.Running, key: str, slurm_site: devcluster.Site, step: str
) -> None:
    """Whom it watched over goes on; Slurm ends the job once it looks, and everything of it with it."""
    load = drills.Load(house, key)
    row = load.rows()[0]
    lease_id = row["lease_id"]
    os.kill(drills.step_daemons(slurm_site, row["slurm_job_id"])[step], signal.SIGKILL)
    load.whole(at_once=True)
    later = drills.Load(house, key)
    slurm(slurm_site, "scancel", row["slurm_job_id"])  # as Slurm does once the node tells it
    later.over()
    waiting.eventually(
        lambda: (
            not [each for each in house.processes() if any(lease_id in word for word in each.argv)]
        ),
        "the lease's last process to end",
    )
    assert drills.job_state(house, lease_id)["state"] == "ended"
    drills.books_agree(house, lease_id)


def test_agent_killed(house: running.Running, key: str) -> None:
    """The slots see it and end, the job ends, a lease takes its place; its books agree with sacct's."""
    load = drills.Load(house, key)
    row = load.rows()[0]
    (agent,) = (
        each
        for each in house.processes()
        if each.part == "agent" and any(row["lease_id"] in word for word in each.argv)
    )
    agent.kill()
    load.over()
    assert drills.job_state(house, row["lease_id"])["state"] == "ended"
    drills.books_agree(house, row["lease_id"])


@pytest.mark.parametrize("grace_s", [0, pytest.param(3, marks=pytest.mark.long)])
def test_preempted_by_slurm(
    house: running.Running, key: str, slurm_site: devcluster.Site, grace_s: int
) -> None:
    """Slurm preempts a lease (SIGTERM twice and more): it leaves in time, with all its books closed."""
    load = drills.Load(house, key)
    row = load.rows()[0]
    with preempting(slurm_site, row["slurm_job_id"], grace_s) as job_id:
        load.whole()

        def gone() -> bool:
            return bool(drills.job_state(house, row["lease_id"])["state"] == "ended")

        took = drills.until(gone, "the preempted lease to end")
        print(f"preempted with GraceTime={grace_s}: ended {took:.1f} s after the last stream")
        waiting.eventually(lambda: state(slurm_site, job_id) == "RUNNING", "the winner to run")
    load.over()
    drills.books_agree(house, row["lease_id"])


def state(site: devcluster.Site, job_id: str) -> str:
    """Return a job's state in Slurm's words."""
    return slurm(site, "squeue", "-h", "-j", job_id, "-o", "%T").strip()


def slurm(site: devcluster.Site, *argv: str) -> str:
    """Run one of Slurm's commands."""
    return subprocess.run(
        argv, env={**os.environ, **site.env()}, capture_output=True, text=True, check=True
    ).stdout


@contextlib.contextmanager
def preempting(site: devcluster.Site, job_id: str, grace_s: int) -> Iterator[str]:
    """Move a lease into a partition that gives way, and submit what takes its node from it."""
    node = slurm(site, "squeue", "-h", "-j", job_id, "-o", "%N").strip()
    slurm(site, "scontrol", "update", "partitionname=serve", "preemptmode=requeue",
          f"gracetime={grace_s}", "prioritytier=1")  # fmt: skip
    winner = slurm(site, "sbatch", "--parsable", "-p", "user", "-o", "/dev/null", "-w", node,
                   "--gres=gpu:4", "-t", "5", "--wrap", "sleep 300").strip()  # fmt: skip
    try:
        yield winner
    finally:
        slurm(site, "scancel", winner)
        slurm(site, "scontrol", "update", "partitionname=serve", "preemptmode=off",
              "gracetime=0", "prioritytier=100")  # fmt: skip
