"""A model larger than a node, in a whole installation: one lease of two nodes, lost with either."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from engines import processes
from tests.integration.whole import running, waiting

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
GPUS = 8  # of the replica; a node has half


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[running.Running]:
    """An installation on two nodes of the embedded Slurm."""
    slurm = {"client": "embedded", "embedded_nodes": 2, "embedded_kill_wait_s": 5.0}
    models = running.simulated(1).replace("gpus = 4", f"gpus = {GPUS}")
    made = running.Running(
        tmp_path_factory.mktemp("over"),
        slurm,
        models=models,
        replicas=1,
        scheduler={"node_gpus": GPUS // 2},
    )
    try:
        made.up()
        yield made
    finally:
        made.close()


def test_it_has_a_lease_of_whole_nodes_and_is_lost_with_any_of_its_ranks(
    laptop: running.Running,
) -> None:
    (one,) = laptop.replicas()
    (lease,) = laptop.leases()
    assert (lease["gpus"], lease["nodes"], one["nodes"]) == (GPUS, ["e1", "e2"], ["e1", "e2"])
    shown = laptop.command("fctl", "show", "replica", one["replica_id"], key=laptop.admin_key)
    assert " node=e1,e2 " in shown.out, shown
    body = {"model": running.MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert laptop.call("POST", "/v1/chat/completions", body)["choices"]

    mark = {processes.REPLICA: one["replica_id"], processes.SLOT: f"{one['slot_id']}.1"}
    (rank,) = processes.marked(mark)
    os.kill(rank, signal.SIGKILL)

    def over() -> dict[str, Any]:
        rows = laptop.call("GET", "/admin/replicas", all="true")["replicas"]
        (row,) = (each for each in rows if each["replica_id"] == one["replica_id"])
        assert row["state"] == "lost", row
        found: dict[str, Any] = row
        return found

    row = waiting.eventually(over, "the end of the replica")
    assert row["reason"].startswith("rank 1 on e2: killed by SIGKILL"), row
    assert row["nodes"] == ["e1", "e2"], "the registry knows where it was"
    laptop.settled()
    assert laptop.call("POST", "/v1/chat/completions", body)["choices"]
