"""The cluster in a folder, for real: up, twice, beside another, hurt, and down without a trace."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_plugins import devcluster
from slurm_plugins.devcluster import processes, site
from tests import realslurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


def run(on: devcluster.Site, *argv: str, cwd: Path | None = None) -> str:
    """Run one of Slurm's commands against a cluster and return what it printed."""
    done = subprocess.run(
        argv,
        env={**os.environ, **on.env()},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout


def test_a_job_sees_its_gpus_and_steps_get_their_own(
    slurm_site: devcluster.Site, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        'echo "job $CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS"\n'
        "for step in 1 2; do\n"
        "  srun --exact -n1 -c1 --gres=gpu:2 --mem=0 bash -c "
        f"'echo step $CUDA_VISIBLE_DEVICES; touch {tmp_path}/up.$SLURM_STEP_ID; "
        f"until [ -e {tmp_path}/up.0 ] && [ -e {tmp_path}/up.1 ]; do sleep 0.05; done' &\n"
        "done\nwait\n"
    )
    out = tmp_path / "out"
    run(slurm_site, "sbatch", "--wait", "-A", "physics", "--gres=gpu:4", "-c4", "--mem=0",
        "-o", str(out), str(script))  # fmt: skip
    lines = sorted(out.read_text().splitlines())
    assert lines[0] == "job 0,1,2,3 0,1,2,3"
    assert sorted(lines[1:]) == ["step 0,1", "step 2,3"]


def test_accounting_counts_gpus_and_charges_the_account(
    slurm_site: devcluster.Site, tmp_path: Path
) -> None:
    job = run(slurm_site, "sbatch", "--parsable", "--wait", "-A", "biology", "--gres=gpu:3",
              "-o", str(tmp_path / "out"), "--wrap", "true").strip()  # fmt: skip
    rows = ""

    def written() -> bool:
        nonlocal rows
        rows = run(slurm_site, "sacct", "-D", "-n", "-P", "-X", "-j", job,
                   "-o", "account,state,alloctres")  # fmt: skip
        return "COMPLETED" in rows

    assert processes.wait_until(written, 20.0), rows
    account, state, tres = rows.strip().split("|")
    assert (account, state) == ("biology", "COMPLETED")
    assert "gres/gpu=3" in tres.split(",")


def test_teams_are_accounts_with_their_users(slurm_site: devcluster.Site) -> None:
    rows = run(slurm_site, "sacctmgr", "-n", "-P", "show", "assoc", "format=account,user")
    pairs = set(rows.split())
    assert {"physics|alice", "physics|root", "biology|bob", "biology|root"} <= pairs


def test_rest_answers_with_a_token(slurm_site: devcluster.Site) -> None:
    import httpx

    token = run(slurm_site, "scontrol", "token", f"username={slurm_site.rest_user}")
    parser = "v0.0.38" if slurm_site.version.startswith("22.05") else "v0.0.42"
    with httpx.Client(trust_env=False, timeout=20) as client:
        answer = client.get(
            f"{slurm_site.rest_url}/slurm/{parser}/ping",
            headers={
                "X-SLURM-USER-NAME": slurm_site.rest_user,
                "X-SLURM-USER-TOKEN": token.strip().removeprefix("SLURM_JWT="),
            },
        )
    assert answer.status_code == 200
    assert answer.json()["pings"][0]["hostname"]


def test_up_again_changes_nothing_and_mends_what_died(tmp_path: Path) -> None:
    realslurm.require_slurm()
    folder = tmp_path / "cluster"
    try:
        first = devcluster.up(folder, **options())
        before = pids(folder)
        assert devcluster.up(folder, **options()) == first
        assert pids(folder) == before

        os.kill(before["slurmd-n1"], signal.SIGKILL)
        os.kill(before["slurmctld"], signal.SIGKILL)
        assert devcluster.up(folder, **options()) == first
        after = pids(folder)
        assert after["munged"] == before["munged"]
        assert after["slurmd-n1"] != before["slurmd-n1"]
        assert devcluster.status(folder).nodes == {"n1": "idle"}
    finally:
        devcluster.down(folder)
        down = devcluster.status(folder)
        devcluster.down(folder, purge=True)
    assert processes.members(site.layout(folder)) == []
    assert down.daemons
    assert not any(daemon.pid for daemon in down.daemons)
    assert [path.name for path in folder.iterdir()] == ["log"]


def test_down_ends_jobs_and_orphans_and_leaves_the_other_cluster_alone(
    slurm_site: devcluster.Site, tmp_path: Path
) -> None:
    folder = tmp_path / "second"
    other = devcluster.status(slurm_site.folder)
    try:
        second = devcluster.up(folder, **options())
        assert {second.ports.slurmctld, *second.ports.slurmd}.isdisjoint(slurm_site.ports.all())
        flag = tmp_path / "orphan.pid"
        run(second, "sbatch", "--gres=gpu:1", "-o", str(tmp_path / "out"), "--wrap",
            f"setsid sleep 600 & echo $! >{flag}.new; mv {flag}.new {flag}; sleep 600")  # fmt: skip
        assert processes.wait_until(flag.exists, 20.0)
        orphan = int(flag.read_text())
        assert orphan in {process.pid for process in processes.members(site.layout(folder))}
    finally:
        devcluster.down(folder, purge=True)
    assert processes.members(site.layout(folder)) == []
    assert not alive(orphan)
    assert devcluster.status(slurm_site.folder) == other
    assert run(slurm_site, "squeue", "-h") is not None


def test_another_shape_restarts_the_daemons(tmp_path: Path) -> None:
    realslurm.require_slurm()
    folder = tmp_path / "cluster"
    try:
        devcluster.up(folder, **options())
        wider = devcluster.up(folder, **options(nodes=2))
        assert wider.nodes == ("n1", "n2")
        assert run(wider, "sinfo", "-h", "-o", "%D", "-p", "user").strip() == "2"
    finally:
        devcluster.down(folder, purge=True)


def test_what_a_killed_parent_left_is_found_by_its_mark(tmp_path: Path) -> None:
    realslurm.require_slurm()
    folder = tmp_path / "cluster"
    try:
        devcluster.up(folder, **options())
        where = site.layout(folder)
        shutil.rmtree(where.run)  # as if we had died before a pid was written down
        where.record.unlink()
        assert processes.members(where)
    finally:
        devcluster.down(folder, purge=True)
    assert processes.members(where) == []


def test_up_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    realslurm.require_slurm()
    folder = tmp_path / "cluster"
    where = site.layout(folder)
    code = (
        "import pathlib; from slurm_plugins import devcluster; "
        f"devcluster.up(pathlib.Path({str(folder)!r}), nodes=1, gpus_per_node=2, rest=False)"
    )
    try:
        for stage in ("mariadb-install.log", "slurmctld.out"):
            with subprocess.Popen([sys.executable, "-c", code]) as process:
                reached = processes.wait_until((where.log / stage).exists, 30.0, every_s=0.01)
                process.kill()
            assert reached
        mended = devcluster.up(folder, nodes=1, gpus_per_node=2, rest=False)
        assert devcluster.status(folder).nodes == {"n1": "idle"}
        assert (
            run(mended, "sacctmgr", "-n", "-P", "show", "cluster", "format=cluster") == "forebay\n"
        )
    finally:
        devcluster.down(folder, purge=True)
    assert processes.members(where) == []


def options(nodes: int = 1) -> site.Options:
    """A small cluster, as keyword arguments."""
    return {"nodes": nodes, "gpus_per_node": 2, "rest": False, "accounting": False}


def pids(folder: Path) -> dict[str, int]:
    """Return the living daemons' pids."""
    return {d.name: d.pid for d in devcluster.status(folder).daemons if d.pid}


def alive(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
