"""Case E6: a whole installation where every process inherits the cluster's proxy, and nobody asks it."""

from pathlib import Path

import pytest

from tests.integration.whole import clients, running

PROXY = "http://127.0.0.1:9"  # nobody listens there


@pytest.mark.timeout(180)
def test_leases_stats_and_answers_work_beside_a_dead_proxy_e6(tmp_path: Path) -> None:
    names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    env = {name: PROXY for lower in names for name in (lower, lower.upper())}
    slurm = {"client": "embedded", "embedded_kill_wait_s": 5.0}
    made = running.Running(tmp_path, slurm, "", {**env, "no_proxy": "", "NO_PROXY": ""})
    try:
        made.up()
        key = made.key
        stream = clients.Stream(made, key, 10).begun().ended()
        assert stream.whole
        assert [row["outcome"] for row in made.attempts_of(stream.request_id)] == ["ok"]
        replicas = made.replicas()
        assert len(replicas) == running.REPLICAS
        assert all(each["stats"]["seats"] > 0 for each in replicas)
        shown = made.command("fctl", "show", "replicas", key=key)
        assert shown.code == 0, shown.err
    finally:
        made.close()
