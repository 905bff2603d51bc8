"""Embeddings by real vLLM on the real cluster: to zero when nobody asks, and back with the first request."""

import base64
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import tinymodel
from slurm_plugins import devcluster
from slurm_plugins.devcluster import accounts
from tests.contract import engine_vllm
from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]
COLD_S = 900.0  # imports of vLLM on a machine that is full; 30 s on an idle one
MODEL = "embed"


def table(weights: Path) -> str:
    """Return the model: nobody's floor, one replica at most, given back after ten seconds."""
    return f"""
[[models]]
name = "{MODEL}"
runner = "embed"
weights = "{weights}"
gpus = 1
seats = 4
reserved_seats = 0
scaling = {{ maximum = 1, idle_to_zero_s = 10.0 }}
engine_args = {{ enforce-eager = true, kv-cache-memory-bytes = "16M", dtype = "float32" }}
"""


@pytest.fixture(scope="module")
def site(
    slurm_site: devcluster.Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[running.Running]:
    """An installation with one simulated model that stays, so that there is something at rest."""
    engine_vllm.require(engine_vllm.NEWEST)
    accounts.create(slurm_site, {"physics": ["nobody"]}, [])
    folder = tmp_path_factory.mktemp("zero")
    tinymodel.make(folder / "weights")
    slurm = {
        "client": "cli",
        "conf": str(slurm_site.slurm_conf),
        "account": "physics",
        "call_timeout_s": 10.0,
    }
    made = running.Running(
        folder,
        slurm,
        env={
            **slurm_site.env(),
            "FOREBAY_ENGINES_VLLM_PYTHON": str(engine_vllm.python(engine_vllm.NEWEST)),
            "FOREBAY_ENGINES_START_TIMEOUT_S": str(COLD_S),
        },
        gateway={"no_replica_grace_s": 2.0, "deadline_interactive_s": COLD_S},
        scheduler={"start_timeout_s": COLD_S, "scale_down_s": 5.0},
        models=running.simulated(1) + table(folder / "weights"),
        replicas=1,
    )
    try:
        made.up()
        yield made
    finally:
        made.close()


def replicas(site: running.Running) -> list[str]:
    found = site.call("GET", "/admin/replicas")["replicas"]
    return [each["state"] for each in found if each["spec"]["model"] == MODEL]


def ask(site: running.Running) -> tuple[int, dict[str, str], list[float]]:
    """Ask for an embedding once; returns status, headers and the vector."""
    body = {"model": MODEL, "input": "The water falls.", "encoding_format": "base64"}
    answer = clients.post(site, site.key, body, path="/v1/embeddings")
    if answer.status_code != 200:
        return answer.status_code, dict(answer.headers), []
    raw = base64.b64decode(answer.json()["data"][0]["embedding"])
    return 200, dict(answer.headers), list(struct.unpack(f"<{len(raw) // 4}f", raw))


def until_served(site: running.Running) -> tuple[list[float], list[float]]:
    """Ask as a client does that heeds Retry-After; returns the vector, and how long it was told to wait."""
    told: list[float] = []
    end = time.monotonic() + COLD_S
    site.client.timeout = COLD_S
    while time.monotonic() < end:
        status, headers, vector = ask(site)
        if status == 200:
            return vector, told
        assert status in {503, 504}, (status, headers)
        told.append(float(headers["retry-after"]))
        time.sleep(min(5.0, told[-1]))
    raise AssertionError(f"not served within {COLD_S} s; {site.log()[-2000:]}")


def test_to_zero_and_back_twice(site: running.Running) -> None:
    assert not replicas(site)
    first, _ = until_served(site)
    assert math.isclose(sum(value * value for value in first), 1.0, rel_tol=1e-3)
    took = site.call("GET", "/admin/leases")
    assert len(took["leases"]) == 2

    def gone() -> bool:
        assert not replicas(site)
        assert len(site.leases()) == 1  # and its GPU is Slurm's again
        return True

    waiting.eventually(gone, "the model at zero", 300.0)
    again, told = until_served(site)
    assert again == pytest.approx(first, abs=1e-6)
    # By now a start has been timed: whoever is sent away hears for how long, and not a constant.
    assert all(seconds > 5.0 for seconds in told[1:]), told
    rows = [row for row in site.attempts() if row["model"] == MODEL and row["outcome"] == "ok"]
    assert len(rows) == 2
    assert {row["endpoint"] for row in rows} == {"/v1/embeddings"}
