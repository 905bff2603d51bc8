"""A server that runs elsewhere is attached as a replica: on no GPU, metered, watched, lost when it ends."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slurm_plugins import devcluster
from slurm_plugins.devcluster import accounts
from tests.bench import models
from tests.integration.whole import running, waiting

pytestmark = pytest.mark.timeout(400)
MODEL = "remote"


@pytest.fixture
def elsewhere() -> Iterator[tuple[models.External, str]]:
    """Run an OpenAI-compatible server; yields it and its URL."""
    server = models.External()
    url = server.start()
    yield server, url
    server.stop()


def test_on_the_embedded_slurm(tmp_path: Path, elsewhere: tuple[models.External, str]) -> None:
    house = running.Running(
        tmp_path, {"client": "embedded"}, models=running.simulated(1), replicas=1
    )
    attached(house, *elsewhere)


@pytest.mark.slurm
@pytest.mark.long
def test_on_a_real_cluster(
    tmp_path: Path, slurm_site: devcluster.Site, elsewhere: tuple[models.External, str]
) -> None:
    """Slurm's submit filter lets a lease without GPUs in, and its step starts what stands there."""
    accounts.create(slurm_site, {"physics": ["nobody"]}, [])
    slurm = {"client": "cli", "conf": str(slurm_site.slurm_conf), "account": "physics"}
    house = running.Running(
        tmp_path,
        slurm,
        str(slurm_site.munge_socket),
        slurm_site.env(),
        models=running.simulated(1),
        replicas=1,
    )
    attached(house, *elsewhere)


def attached(house: running.Running, server: models.External, url: str) -> None:
    """Attach the server, use it, take it away."""
    try:
        house.up()
        fields = ("engine=http", f"weights={url}/v1", "seats=16", "engine_args.probe-s=0.2")
        for line in (("model", "add", MODEL), ("version", "add", MODEL, "v1", *fields)):
            told = house.command("fctl", *line, key=house.admin_key)
            assert told.code == 0, told.err

        def served() -> httpx.Response:
            answer = ask(house)
            assert answer.status_code == 200, answer.text
            return answer

        answer = waiting.eventually(served, "an answer of the attached server", 120.0)
        assert "[DONE]" in answer.text
        assert len(server.came) == 1
        (replica,) = mine(house)
        (lease,) = (one for one in house.leases() if one["lease_id"] == replica["lease_id"])
        assert (lease["gpus"], lease["hardware"]["gres"]) == (0, "none")

        def booked() -> dict[str, Any]:
            (row,) = (one for one in house.attempts() if one["outcome"] == "ok")
            found: dict[str, Any] = row
            return found

        row = waiting.eventually(booked, "its row")
        assert (row["model"], row["output_tokens"]) == (MODEL, models.TOKENS)
        assert row["uncached_prompt_tokens"] + row["cached_prompt_tokens"] == 8  # as it tells

        server.stop()

        def out() -> bool:
            (one,) = mine(house)
            assert one["state"] != "serving", one
            assert "does not answer" in one["reason"]
            return True

        waiting.eventually(out, "the replica leaves the routes")
        shown = house.command("fctl", "show", "replica", replica["replica_id"], key=house.admin_key)
        assert f"{url} does not answer" in shown.out
        versions = house.command("fctl", "version", "list", MODEL, "--json", key=house.admin_key)
        assert json.loads(versions.out)[0]["status"] == "1 warm"
    except BaseException:
        print(house.log()[-6000:])
        raise
    finally:
        house.close()


def mine(house: running.Running) -> list[dict[str, Any]]:
    """Return the model's replicas in any state that is not final."""
    found = house.call("GET", "/admin/replicas")["replicas"]
    return [one for one in found if one["spec"]["model"] == MODEL]


def ask(house: running.Running) -> httpx.Response:
    """Ask for a streamed chat."""
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    return house.client.post(
        f"{house.http}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {house.key}"},
    )
