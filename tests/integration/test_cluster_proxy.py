"""Case E6: a whole installation where every process inherits the cluster's proxy, and nobody asks it."""

from pathlib import Path

import pytest

from tests.integration import conftest
from tests.integration.whole import clients, running


@pytest.mark.timeout(300)
def test_leases_stats_and_answers_work_beside_a_dead_proxy_e6(laptop: running.Running) -> None:
    for part in ("broker", "gateway", "batchd"):
        environ = Path(f"/proc/{laptop.part(part).pid}/environ").read_text()
        assert f"http_proxy={conftest.PROXY}" in environ
    stream = clients.Stream(laptop, laptop.key, 10).begun().ended()
    assert stream.whole
    assert [row["outcome"] for row in laptop.attempts_of(stream.request_id)] == ["ok"]
    replicas = laptop.replicas()
    assert len(replicas) == running.REPLICAS
    assert all(each["stats"]["seats"] > 0 for each in replicas)
    shown = laptop.command("fctl", "show", "replicas", key=laptop.key)
    assert shown.code == 0, shown.err
