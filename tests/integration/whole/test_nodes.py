"""A node dies under load: Slurm's daemon there and every process at once, and nobody says goodbye."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from slurm_plugins import devcluster
from slurm_plugins.devcluster import processes as daemons
from slurm_plugins.devcluster import site as layout
from tests.integration.whole import drills, running, test_daemons, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def die(site: devcluster.Site, house: running.Running, job_id: str, node: str) -> None:
    """Kill everything that a node runs for a job, its slurmd first, so that it hears of nothing."""
    os.kill(drills.daemon(site, f"slurmd-{node}"), signal.SIGKILL)
    for pid in drills.step_daemons(site, job_id).values():
        os.kill(pid, signal.SIGKILL)
    inside = [
        process.pid
        for process in daemons.members(layout.layout(site.folder))
        if process.environ.get("SLURM_JOB_ID") == job_id
    ]
    for pid in inside:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_a_node_dies(house: running.Running, key: str, slurm_site: devcluster.Site) -> None:
    """Its streams and lines go on elsewhere, it is cordoned and reported, others take its place."""
    load = drills.Load(house, key)
    row = load.rows()[0]
    lease_id, job_id = row["lease_id"], row["slurm_job_id"]
    (node,) = drills.job_state(house, lease_id)["nodes"]
    with test_daemons.mended(slurm_site):
        died = time.monotonic()
        die(slurm_site, house, job_id, node)
        load.whole()

        def cordoned() -> bool:
            found = house.call("GET", "/admin/nodes")["nodes"]
            (mine,) = (each for each in found if each["name"] == node)
            return mine["cordon"] is not None

        waiting.eventually(cordoned, f"{node} to be cordoned")
        noticed_s = time.monotonic() - died
        print(f"dead node: cordoned {noticed_s:.1f} s after its death")
        shown = house.command("fctl", "show", "nodes", "--json", key=house.admin_key)
        (mine,) = (each for each in json.loads(shown.out)["nodes"] if each["name"] == node)
        assert mine["cordon"]["by"] == "forebay"
        assert lease_id in mine["cordon"]["reason"]
        assert "agent silent" in mine["cordon"]["reason"]
        listed = house.command("fctl", "show", "nodes", key=house.admin_key).out
        assert any(node in line and "cordoned" in line for line in listed.splitlines()), listed

        def elsewhere() -> bool:
            nodes = [each["node"] for each in house.replicas()]
            return len(nodes) == running.REPLICAS and node not in nodes

        waiting.eventually(elsewhere, "a replica on another node")
        print(f"dead node: replaced {time.monotonic() - died:.1f} s after its death")
        load.job.finished()
    ended = house.command("fctl", "uncordon", node, key=house.admin_key)
    assert ended.code == 0, ended.err
    house.settled()
    assert drills.job_state(house, lease_id)["state"] == "ended"
    _books_lack_only_what_nobody_saw(house, lease_id, noticed_s)


def _books_lack_only_what_nobody_saw(
    house: running.Running, lease_id: str, noticed_s: float
) -> None:
    """Slurm counts a dead node's GPUs until we give the lease back; our books end with its agent."""

    def known() -> bool:
        rows = house.call("GET", "/forebay/v1/usage/reconcile")["rows"]
        (mine,) = (row for row in rows if row["lease_id"] == lease_id)
        assert mine["agrees"] is not None, mine
        ours = mine["forebay_us"] + mine["early_us"] - mine["late_us"]
        apart_s = (mine["sacct_us"] - ours) / 1e6 / mine["gpus"]
        assert -1.0 <= apart_s <= noticed_s + 1.0, mine
        return True

    waiting.eventually(known, f"Slurm's word on lease {lease_id}")
