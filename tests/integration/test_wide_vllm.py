"""Real vLLM over two nodes of a real Slurm cluster: as good as on one, and gone with any of its ranks."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import processes, tinymodel
from slurm_plugins import devcluster
from tests import realslurm
from tests.contract import engine_vllm
from tests.integration.whole import running, waiting

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]
START_S = 900.0
_MODEL = """
[[models]]
name = "{name}"
weights = "{weights}"
seats = 8
reserved_seats = 1
itl_slo_ms = 10000
max_context = 1024
gpus = {gpus}
replicas = 1
[models.engine_args]
dtype = "float32"
enforce-eager = true
kv-cache-memory-bytes = 33554432
{more}
"""


class House(running.Running):
    """An installation with one model on one node and the same on two, on nodes of one GPU."""

    def __init__(self, folder: Path, site: devcluster.Site, version: str) -> None:
        tinymodel.main([str(folder / "tiny")])
        slurm = {"client": "cli", "conf": str(site.slurm_conf), "account": "physics"}
        models = "".join(
            _MODEL.format(name=name, weights=folder / "tiny", gpus=gpus, more=more)
            for name, gpus, more in (
                ("narrow", 1, ""),
                ("wide", 2, "pipeline-parallel-size = 2"),
            )
        )
        super().__init__(
            folder,
            slurm,
            str(site.munge_socket),
            site.env(),
            scheduler={"node_gpus": 1, "start_timeout_s": START_S},
            models=models,
            replicas=2,
        )
        python = json.dumps(str(engine_vllm.python(version)))
        text = self.config_file.read_text()
        self.config_file.write_text(
            text.replace("[engines]\n", f"[engines]\nvllm_python = {python}\n")
        )

    def settled(self, within_s: float = START_S) -> None:
        super().settled(max(within_s, START_S))

    def says(self, model: str) -> Any:
        """Return what a model answers, greedily."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "temperature": 0,
            "max_tokens": 40,
            "ignore_eos": True,
        }
        answer = self.client.post(
            f"{self.http}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {self.key}"},
        )
        assert answer.is_success, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    def below(self, slot_id: str, rank: int) -> set[int]:
        """Return what runs below the supervisor of a slot's part: its fork server, and a rank's processes."""
        part = f"{slot_id}.{rank}" if rank else slot_id
        return engine_vllm.descendants(min(processes.marked({processes.SLOT: part})))

    def wide(self) -> dict[str, Any]:
        """Return the replica over two nodes."""
        (found,) = (one for one in self.replicas() if one["spec"]["model"] == "wide")
        return found


@pytest.fixture(scope="module", params=[engine_vllm.NEWEST, engine_vllm.BEFORE])
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    realslurm.require_slurm()
    engine_vllm.require(request.param)
    folder = tmp_path_factory.mktemp("wide")
    cluster = tmp_path_factory.mktemp("slurm")
    accounts = {"physics": ("root",)}
    site = devcluster.up(cluster, nodes=3, gpus_per_node=1, name="wide", accounts=accounts)
    made = House(folder, site, request.param)
    try:
        made.up()
        yield made
    finally:
        made.close()
        devcluster.down(cluster, purge=True)
        shutil.rmtree(cluster, ignore_errors=True)


def test_two_nodes_say_what_one_does_and_the_death_of_a_rank_is_told(house: House) -> None:
    one = house.wide()
    replica_id = one["replica_id"]
    assert len(set(one["nodes"])) == 2, one
    (lease,) = (each for each in house.leases() if each["lease_id"] == one["lease_id"])
    assert (lease["gpus"], lease["nodes"]) == (2, one["nodes"])
    shown = house.command("fctl", "show", "replica", replica_id, key=house.admin_key)
    assert f"node={','.join(one['nodes'])}" in shown.out, shown

    alone = house.says("narrow")
    assert alone.strip()
    assert house.says("wide") == alone

    # The worker of rank 1, which alone knows what has happened to it.
    below = [house.below(one["slot_id"], rank) for rank in range(2)]
    (worker,) = (pid for pid in below[1] if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)

    def over() -> dict[str, Any]:
        params = {"all": "true"}
        rows = house.call("GET", "/admin/replicas", **params)["replicas"]
        (row,) = (each for each in rows if each["replica_id"] == replica_id)
        assert row["state"] == "lost", row
        found: dict[str, Any] = row
        return found

    row = waiting.eventually(over, "the end of the replica")
    assert f"rank 1 on {one['nodes'][1]}: " in row["reason"], row
    assert "log ends" in row["reason"], row
    living = [[pid for pid in pids if processes.alive(pid)] for pids in below]
    assert max(map(len, living)) <= 1, "nothing but the slots' fork servers is left"

    house.settled()
    assert house.wide()["replica_id"] != replica_id
    assert house.says("wide") == alone
    house.down()
    assert house.processes() == []
    assert house.slurm_jobs() == []
