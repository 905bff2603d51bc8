"""More adapters than fit, on a whole installation: simulated here, and vLLM on a real cluster at length."""

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto import server as moto_server

from engines import lora, tinymodel
from slurm_plugins import devcluster
from slurm_plugins.devcluster import accounts
from tests.bench import models_adapters
from tests.contract import engine_vllm
from tests.integration.whole import running, waiting

MODEL = running.MODEL


def listed(house: models_adapters.House, key: str) -> set[str]:
    """Return the names in /v1/models."""
    answer = house.client.get(f"{house.http}/v1/models", headers={"Authorization": f"Bearer {key}"})
    return {one["id"] for one in answer.json()["data"]}


def status(house: models_adapters.House, model: str, key: str = "") -> tuple[int, str]:
    """Return how a request is answered."""
    answer = house.client.post(
        f"{house.http}/v1/completions",
        json={"model": model, "prompt": "x", "max_tokens": 2, "forebay_deadline_ms": 60_000},
        headers={"Authorization": f"Bearer {key or house.key}"},
    )
    return answer.status_code, answer.text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[models_adapters.House]:
    """One simulated replica with one slot for adapters."""
    made = models_adapters.House(
        tmp_path_factory.mktemp("adapters"), {"client": "embedded"}, real=False, slots=1, replicas=1
    )
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.mark.timeout(400)
class TestOneSlot:
    def test_two_registered_at_once_are_both_served_in_turn(
        self, house: models_adapters.House
    ) -> None:
        """E5: the second adapter on a base never loaded until the first was removed."""
        for number, name in enumerate(("law", "tax")):
            house.declare(name, number)
        names = [f"{MODEL}:law", f"{MODEL}:tax"]
        waiting.eventually(lambda: set(names) <= listed(house, house.key), "both listed", 20.0)
        found: dict[str, set[str]] = {name: set() for name in (MODEL, *names)}
        found[MODEL].add(house.ask(MODEL)[0])
        for turn in range(50):
            name = names[turn % 2]
            found[name].add(house.ask(name)[0])
        assert [len(texts) for texts in found.values()] == [1, 1, 1], found
        assert len(set.union(*found.values())) == 3
        gone = [line for line in house.changes() if " goes from " in line]
        assert len(gone) >= 20
        assert "was used least, room for" in gone[-1]
        rows = house.attempts()
        told = [row["adapter"] for row in rows if row["outcome"] == "ok"]
        assert (told.count("law"), told.count("tax"), told.count("")) == (25, 25, 1)

    def test_one_teams_adapter_is_nobody_elses(self, house: models_adapters.House) -> None:
        house.declare("secret", 9, team="biology")
        waiting.eventually(
            lambda: f"{MODEL}:secret" in json.dumps(house.call("GET", "/admin/catalog/adapters"))
            or "secret" in house.loaded(),
            "it is declared", 20.0,
        )  # fmt: skip
        assert f"{MODEL}:secret" not in listed(house, house.key)
        unknown, secret = (status(house, f"{MODEL}:{name}") for name in ("nothing", "secret"))
        assert unknown[0] == secret[0] == 404
        assert unknown[1].replace("nothing", "secret") == secret[1]
        told = house.command("fctl", "adapter", "list", key=house.key)
        assert (told.code, "secret" in told.out, "law" in told.out) == (0, False, True)

    def test_a_bad_one_is_refused_and_one_that_breaks_later_is_in_quarantine(
        self, house: models_adapters.House
    ) -> None:
        outside = house.command(
            *("fctl", "adapter", "add", MODEL, "evil", "path=/etc"), key=house.admin_key
        )
        assert outside.code != 0
        assert "outside the allowed folders" in outside.err
        named = house.command(
            *("fctl", "adapter", "add", MODEL, MODEL, f"path={house.adapters / 'law'}"),
            key=house.admin_key,
        )
        assert "bears its model's name" in named.err
        folder = house.declare("frail", 10)
        (folder / lora.CONFIG).unlink()
        waiting.eventually(
            lambda: f"{MODEL}:frail" in listed(house, house.key), "frail is listed", 20.0
        )
        code, text = status(house, f"{MODEL}:frail")
        assert code == 503
        assert f"no {lora.CONFIG} there" in text
        told = house.command("fctl", "adapter", "list", key=house.admin_key).out
        waiting.eventually(
            lambda: f"no {lora.CONFIG} there"
            in house.command("fctl", "adapter", "list", key=house.admin_key).out,
            told, 20.0,
        )  # fmt: skip
        assert status(house, f"{MODEL}:law")[0] == 200, "the replica serves on"
        assert len(house.replicas()) == 1


@pytest.mark.timeout(400)
def test_one_that_lies_in_a_bucket_is_staged_by_its_node_and_served(tmp_path: Path) -> None:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    known = {"aws_access_key_id": "who", "aws_secret_access_key": "what"}
    keys = tmp_path / "aws"
    keys.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in known.items()))
    keys.chmod(0o600)
    files = tmp_path / "law"
    tinymodel.make_lora(files, seed=3)
    s3 = boto3.resource("s3", endpoint_url=url, region_name="us-east-1", **known)
    bucket = s3.create_bucket(Bucket="site")
    for path in files.iterdir():
        bucket.upload_file(str(path), f"adapters/law/{path.name}")
    env = {
        "FOREBAY_ENGINES_S3_ENDPOINT": url,
        "FOREBAY_ENGINES_S3_CREDENTIALS": str(keys),
        "FOREBAY_ENGINES_WEIGHTS_DIR": str(tmp_path / "disk"),
        "FOREBAY_ENGINES_WEIGHTS_RESERVE_GB": "0.0",
        "FOREBAY_SCHEDULER_ADAPTER_FOLDERS": '["s3://site/adapters"]',
    }
    made = models_adapters.House(
        tmp_path, {"client": "embedded"}, "", env, real=False, slots=1, replicas=1
    )
    try:
        made.up()
        place, adapter = "s3://site/adapters/law", f"{MODEL}:law"
        told = made.command(
            *("fctl", "adapter", "add", MODEL, "law", f"path={place}"), key=made.admin_key
        )
        assert told.code == 0, told.err
        lost = made.command(
            *("fctl", "adapter", "add", MODEL, "lost", "path=s3://site/adapters/lost"),
            key=made.admin_key,
        )
        assert "nothing lies there; check bucket and prefix" in lost.err
        waiting.eventually(lambda: adapter in listed(made, made.key), "it is listed", 20.0)
        answer = made.ask(adapter)[0]
        assert answer != made.ask(MODEL)[0]
        (published,) = (tmp_path / "disk" / "models").iterdir()
        assert (published / lora.TENSORS).read_bytes() == (files / lora.TENSORS).read_bytes()
        server.stop()
        assert made.ask(adapter)[0] == answer
        waiting.eventually(lambda: made.loaded() == {"law": 1}, "it is shown where it is", 20.0)
    except BaseException:
        print(made.log()[-6000:])
        raise
    finally:
        made.close()
        server.stop()


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_twenty_adapters_over_two_replicas_of_vllm_on_a_real_cluster(
    slurm_site: devcluster.Site, tmp_path: Path
) -> None:
    """Answers are those that each adapter gives alone, and never the base's, whatever else is loaded."""
    engine_vllm.require(engine_vllm.NEWEST)
    accounts.create(slurm_site, {"physics": ["nobody"]}, [])
    slurm = {"client": "cli", "conf": str(slurm_site.slurm_conf), "account": "physics"}
    made = models_adapters.House(
        tmp_path, slurm, str(slurm_site.munge_socket), slurm_site.env(), real=True
    )
    try:
        made.up()
        found = models_adapters.measure(made, models_adapters.ADAPTERS, 3)
        assert found["wrong"] == []
        assert found["distinct"] == 1 + models_adapters.ADAPTERS
        assert found["evictions"] >= 10
        assert all(held <= models_adapters.SLOTS for held in found["held"])
        rows = made.attempts()
        assert {row["adapter"] for row in rows} >= {f"a{number:02}" for number in range(20)}
        assert {row["outcome"] for row in rows} == {"ok"}
    except BaseException:
        print(made.log()[-6000:])
        raise
    finally:
        made.close()
