"""Weights and adapters from an S3 server that keeps objects on disk and checks signatures, as a process."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from engines import lora, settings, tinymodel
from engines.weights import stager
from forebay import inspecting
from scheduler.contracts import fleet
from scheduler.runtime.models import document
from tests import endings
from tests.integration.whole import waiting
from tests.unit.weights import places

pytestmark = pytest.mark.timeout(300)
KEY, SECRET = "agents", "known"


class Server:
    """One bucket, `site`.

    Args:
        folder: where its objects lie.
    """

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        argv = ["--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(
            endings.tied(
                "TERM",
                [sys.executable, "-P", "-m", "nanio", "serve", *argv, "--log-level", "warning"],
            ),
            env={**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET},
            start_new_session=True,
        )
        known = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        s3 = boto3.resource("s3", endpoint_url=self.url, region_name="us-east-1", **known)

        def listens() -> bool:
            assert self._process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
            except OSError as error:
                raise AssertionError(str(error)) from error
            return True

        waiting.eventually(listens, "the S3 server")
        self._bucket = s3.create_bucket(Bucket="site")

    def upload(self, folder: Path, prefix: str) -> None:
        """Put a folder's files below a prefix."""
        for path in folder.iterdir():
            self._bucket.upload_file(str(path), f"{prefix}/{path.name}")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server, which may be closed before the end."""
    made = Server(tmp_path / "objects")
    yield made
    made.close()


def options(server: Server, folder: Path, secret: str = SECRET) -> settings.EnginesSettings:
    """Return a site's settings with a key of the server."""
    keys = folder / f"aws-{secret}"
    keys.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n")
    keys.chmod(0o600)
    return settings.EnginesSettings(
        s3_endpoint=server.url, s3_credentials=str(keys), weights_reserve_gb=0.0
    )


async def test_a_base_and_its_adapter_are_judged_staged_and_kept(
    server: Server, tmp_path: Path
) -> None:
    tinymodel.make(tmp_path / "tiny")
    tinymodel.make_lora(tmp_path / "law")
    server.upload(tmp_path / "tiny", "models/tiny")
    server.upload(tmp_path / "law", "adapters/law")
    site = options(server, tmp_path)
    look = inspecting.Inspector(site, ("s3://site/adapters",))
    base = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.VLLM, "s3://site/models/tiny")
    law = document.Adapter(path="s3://site/adapters/law")
    assert look.version(base) == ""
    assert look.adapter(law, [base]) == ""
    node = stager.Stager(site, tmp_path / "disk")
    said: list[str] = []
    weights = await node.get(base, said.append)
    adapter = await node.adapter(law.path, said.append)
    assert weights is not None
    assert adapter is not None
    for use, there in ((weights, tmp_path / "tiny"), (adapter, tmp_path / "law")):
        for path in there.iterdir():
            assert (use.folder / path.name).read_bytes() == path.read_bytes()
        use.close()
    server.close()
    again = await node.adapter(law.path, said.append)  # from the disk
    assert again is not None
    assert (again.folder / lora.TENSORS).is_file()
    again.close()
    assert "its base can't be looked at now" in look.adapter(law, [base])


async def test_what_will_never_come_is_refused_and_not_waited_for(
    server: Server, tmp_path: Path
) -> None:
    server.upload(places.model(tmp_path / "m"), "models/m")
    base = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.VLLM, "s3://site/models/m")
    guessed = options(server, tmp_path, "guessed")
    denied = (
        r"s3://site/models/m: access denied \(SignatureDoesNotMatch\); give the agents' credentials"
    )
    with pytest.raises(stager.Refused, match=denied):
        await stager.Stager(guessed, tmp_path / "disk").get(base, lambda line: None)
    node = stager.Stager(options(server, tmp_path), tmp_path / "disk")
    for place, why in (
        ("s3://site/none", "check bucket and prefix"),
        ("s3://nowhere/m", "no such bucket"),
    ):
        with pytest.raises(stager.Refused, match=why):
            await node.adapter(place, lambda line: None)
