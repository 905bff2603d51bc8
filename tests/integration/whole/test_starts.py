"""A model that can't start: three tries, then quarantine with its log's last lines; others go on."""

import json
from collections.abc import Iterator

import pytest

from tests.integration.whole import drills, running, waiting

pytestmark = pytest.mark.timeout(900)
BROKEN = "broken"
FAULT = "step-base-ms must be a number"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[running.Running]:
    """An installation on the embedded Slurm: one model serves, the engine of another dies at its start."""
    slurm = {"client": "embedded", "embedded_kill_wait_s": 5.0}
    models = running.simulated(1) + running.simulated(1, BROKEN, '"step-base-ms" = "soon"')
    made = running.Running(
        tmp_path_factory.mktemp("broken"),
        slurm,
        models=models,
        replicas=1,
        scheduler={"idle_lease_s": 2.0},
    )
    try:
        made.up()
        yield made
    finally:
        made.close()


def test_three_failed_starts_lead_to_quarantine_with_the_logs_last_lines(
    laptop: running.Running,
) -> None:
    load = drills.Load(laptop, laptop.key, streams=2, tokens=200, lines=20)

    def quarantined() -> str:
        (model,) = (
            m for m in laptop.call("GET", "/admin/models")["models"] if m["model"] == BROKEN
        )
        return str(model["versions"][0]["quarantine_reason"])

    why = waiting.eventually(quarantined, "the broken model's quarantine")
    assert why.startswith("3 failed starts in a row"), why
    assert FAULT in why, why
    shown = laptop.command("fctl", "show", "models", key=laptop.admin_key).out
    assert any(BROKEN in line and FAULT in line for line in shown.splitlines()), shown
    listed = laptop.command("fctl", "show", "replicas", "-a", "--json", key=laptop.admin_key)
    tries = [each for each in json.loads(listed.out)["replicas"] if each["spec"]["model"] == BROKEN]
    assert len(tries) == 3, [each["reason"] for each in tries]
    assert {each["state"] for each in tries} <= {"lost", "quarantined"}
    for each in tries:
        assert "log ends" in each["reason"], each
        assert FAULT in each["reason"], each
        told = laptop.command(
            "fctl", "show", "replica", each["replica_id"], key=laptop.admin_key
        ).out
        assert any("reason=" in line and FAULT in line for line in told.splitlines()), told
    load.over(at_once=True)
