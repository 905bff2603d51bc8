"""Weights and adapters from an S3 server: moto's, which speaks S3 over HTTP, with signatures if asked."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import obstore
import pytest
from obstore import store as stores

from engines import lora, settings
from engines.weights import process, sources, staging, store, task
from forebay import inspecting
from scheduler.contracts import fleet, weights
from scheduler.runtime.models import document
from tests.unit.weights import places


class Bucket:
    """An S3 server with one bucket, which can go away."""

    def __init__(self) -> None:
        from moto import server  # a second that only these tests need

        self._server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.closed = False
        self.url = f"http://127.0.0.1:{self._server.get_host_and_port()[1]}"
        self._objects = stores.S3Store(
            "models",
            endpoint=self.url,
            region="us-east-1",
            access_key_id="who",
            secret_access_key="what",
            client_options={"allow_http": True},
        )

    def renew(self) -> None:
        """Forget all that the server was told, and make the bucket."""
        for method, path in (("POST", "moto-api/reset"), ("PUT", "models")):
            asked = httpx.request(
                method, f"{self.url}/{path}", trust_env=False, verify=False, timeout=60
            )
            asked.raise_for_status()

    def upload(self, folder: Path, prefix: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(self._objects, f"{prefix}/{path.relative_to(folder)}", path)

    def remove(self, key: str) -> None:
        obstore.delete(self._objects, key)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._server.stop()


@pytest.fixture(scope="module")
def standing() -> Iterator[list[Bucket]]:
    """The server that stays until a test ends it: its own end takes half a second."""
    opened: list[Bucket] = []
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
def bucket(standing: list[Bucket]) -> Bucket:
    if not standing or standing[-1].closed:
        standing.append(Bucket())
    standing[-1].renew()
    return standing[-1]


@pytest.fixture
def options(bucket: Bucket, tmp_path: Path) -> task.Options:
    keys = tmp_path / "aws"
    keys.write_text("[default]\naws_access_key_id = who\naws_secret_access_key = what\n")
    keys.chmod(0o600)
    return task.Options(s3_endpoint=bucket.url, s3_credentials=str(keys))


def open_(uri: str, options: task.Options) -> sources.Source:
    return sources.of(weights.parse(uri), options)


def test_a_model_comes_whole_in_ranges(
    bucket: Bucket, options: task.Options, tmp_path: Path
) -> None:
    place = places.model(tmp_path / "m")
    bucket.upload(place, "tiny/v1")
    order = task.Order("s3://models/tiny/v1", chunk=256, parallel=4)
    where = store.Store(tmp_path / "disk")
    done = staging.Staging(order, open_(order.uri, options), where).run()
    for path in place.iterdir():
        assert (where.models(done.key) / path.name).read_bytes() == path.read_bytes()
    assert done.size == done.fetched


def test_a_prefix_does_not_take_its_neighbours_in(
    bucket: Bucket, options: task.Options, tmp_path: Path
) -> None:
    bucket.upload(places.model(tmp_path / "m"), "tiny/v1")
    bucket.upload(places.model(tmp_path / "n"), "tiny/v10")
    names = [one.name for one in open_("s3://models/tiny/v1", options).files()]
    assert len(names) == len(list((tmp_path / "m").iterdir()))


def test_what_is_not_there_is_refused(bucket: Bucket, options: task.Options) -> None:
    with pytest.raises(weights.WeightsError, match="nothing lies there; check bucket and prefix"):
        open_("s3://models/none", options).files()
    with pytest.raises(weights.WeightsError, match="s3://nowhere/m: no such bucket; correct"):
        open_("s3://nowhere/m", options).files()
    with pytest.raises(weights.WeightsError, match="upload it or correct"):
        open_("s3://models/none", options).read("config.json", 0, 10)


def test_an_object_that_vanishes_is_refused_and_nothing_is_published(
    bucket: Bucket, options: task.Options, tmp_path: Path
) -> None:
    bucket.upload(places.model(tmp_path / "m"), "tiny")
    where = store.Store(tmp_path / "disk")

    def vanish(name: str) -> None:
        if name == "begin":
            bucket.remove("tiny/model-00002-of-00003.safetensors")

    order = task.Order("s3://models/tiny", chunk=256, parallel=1)
    with pytest.raises(weights.WeightsError, match=r"00002-of-00003.safetensors: not there"):
        staging.Staging(order, open_(order.uri, options), where, step=vanish).run()
    assert not list((where.root / "models").iterdir())


def test_restarts_work_from_the_disk_while_the_server_is_down_and_growth_says_why_it_waits(
    bucket: Bucket, options: task.Options, tmp_path: Path
) -> None:
    bucket.upload(places.model(tmp_path / "m"), "tiny")
    order = task.Order("s3://models/tiny", chunk=256)
    here = task.Task(str(tmp_path / "here"), order, options, patience=0)
    elsewhere = task.Task(str(tmp_path / "elsewhere"), order, options, patience=1)
    assert process.run(here, lambda said: None) == 0
    bucket.close()
    assert process.run(here, lambda said: None) == 0
    news: list[dict[str, object]] = []
    assert process.run(elsewhere, lambda said: news.append(dict(said)), lambda s: None) == 1
    assert "s3://models/tiny: Generic S3 error" in str(news[0]["waiting"])


def test_credentials_are_ours_alone(tmp_path: Path) -> None:
    keys = tmp_path / "aws"
    keys.write_text("[other]\n")
    keys.chmod(0o644)
    with pytest.raises(weights.WeightsError, match="others may read these credentials; chmod 600"):
        sources.credentials(keys)
    keys.chmod(0o600)
    with pytest.raises(weights.WeightsError, match=r"needs .default. with aws_access_key_id"):
        sources.credentials(keys)
    with pytest.raises(weights.WeightsError, match="No such file"):
        sources.credentials(tmp_path / "none")
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ


def _adapter(folder: Path, *, width: int = places.HIDDEN) -> Path:
    """Write a LoRA adapter of rank 2 on the query projections of `places.model`."""
    folder.mkdir(parents=True)
    (folder / lora.CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(places.LAYERS):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        shapes |= {f"{at}.lora_A.weight": (2, width), f"{at}.lora_B.weight": (places.HIDDEN, 2)}
    (folder / lora.TENSORS).write_bytes(places.shard(shapes))
    return folder


def test_an_adapter_lies_in_the_bucket_and_is_judged_beside_its_base_there(
    bucket: Bucket, options: task.Options, tmp_path: Path
) -> None:
    bucket.upload(places.model(tmp_path / "m"), "tiny")
    bucket.upload(_adapter(tmp_path / "law"), "adapters/law")
    bucket.upload(_adapter(tmp_path / "other", width=16), "adapters/other")
    site = settings.EnginesSettings(
        s3_endpoint=options.s3_endpoint, s3_credentials=options.s3_credentials
    )
    judge = inspecting.Inspector(site, ("s3://models/adapters",)).adapter
    base = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.VLLM, "s3://models/tiny")
    law = document.Adapter(path="s3://models/adapters/law", rank=2)
    assert judge(law, [base]) == ""
    assert judge(document.Adapter(path="s3://models/adapters/other"), [base]) == (
        "s3://models/adapters/other: was made for another base than chat v1: q_proj of layer 0 is 16 wide "
        "there, not 8"
    )
    assert "nothing lies there" in judge(document.Adapter(path="s3://models/adapters/none"), [base])
    where = store.Store(tmp_path / "disk")
    order = task.Order(law.path, chunk=64, adapter=True)
    done = staging.Staging(order, open_(order.uri, options), where).run()
    for path in (tmp_path / "law").iterdir():
        assert (where.models(done.key) / path.name).read_bytes() == path.read_bytes()
    bucket.close()
    assert "its base can't be looked at now" in judge(law, [base])


def test_requests_are_signed_and_who_may_not_read_is_told_what_is_missing(
    bucket: Bucket, options: task.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server computes each signature itself from here on, and knows one reader."""
    bucket.upload(places.model(tmp_path / "m"), "tiny")
    key = _reader(bucket.url)
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    told = {}
    for who, secret in (("right", key["SecretAccessKey"]), ("wrong", "guessed")):
        file = tmp_path / who
        file.write_text(
            f"[default]\naws_access_key_id = {key['AccessKeyId']}\naws_secret_access_key = {secret}\n"
        )
        file.chmod(0o600)
        told[who] = task.Options(s3_endpoint=bucket.url, s3_credentials=str(file))
    order = task.Order("s3://models/tiny", chunk=256)
    where = store.Store(tmp_path / "disk")
    done = staging.Staging(order, open_(order.uri, told["right"]), where).run()
    assert done.fetched == done.size > 0
    for refused, why in ((told["wrong"], "SignatureDoesNotMatch"), (options, "InvalidAccessKeyId")):
        denied = rf"s3://models/tiny: access denied \({why}\); give .* s3:GetObject"
        with pytest.raises(weights.WeightsError, match=denied):
            open_(order.uri, refused).files()
        with pytest.raises(weights.WeightsError, match=r"config\.json: access denied"):
            open_(order.uri, refused).read("config.json", 0, 8)


def _reader(url: str) -> dict[str, str]:
    """Make a user that may read; returns its key."""
    import boto3

    anybody = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    iam = boto3.client("iam", endpoint_url=url, **anybody)
    iam.create_user(UserName="agents")
    allowed = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    iam.put_user_policy(
        UserName="agents",
        PolicyName="read",
        PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [allowed]}),
    )
    found: dict[str, str] = iam.create_access_key(UserName="agents")["AccessKey"]
    return found
