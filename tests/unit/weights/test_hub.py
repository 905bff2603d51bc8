"""Weights from a Hugging Face repository, with the hub played here: the real one was not reached."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.weights import sources, staging, store, task
from scheduler.contracts import weights
from tests.unit.weights import places

URI = "hf://owner/name@main"


@dataclasses.dataclass
class _Lfs:
    sha256: str


@dataclasses.dataclass
class _Sibling:
    rfilename: str
    size: int
    blob_id: str
    lfs: _Lfs | None


class Hub:
    """The part of huggingface_hub that is used, and its file server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.utils = self
        self.down = False
        self.lie = False
        self.ranges: list[str] = []

    def HfApi(self) -> "Hub":
        return self

    def build_hf_headers(self) -> dict[str, str]:
        return {"authorization": "Bearer token"}

    def model_info(self, name: str, *, revision: str, files_metadata: bool) -> Any:
        assert (name, revision, files_metadata) == ("owner/name", "main", True)
        if self.down:
            raise httpx.ConnectError("no route")

        def sibling(path: Path) -> _Sibling:
            digest = "0" * 64 if self.lie else hashlib.sha256(path.read_bytes()).hexdigest()
            large = path.suffix == ".safetensors"
            return _Sibling(
                path.name, path.stat().st_size, digest[:40], _Lfs(digest) if large else None
            )

        found = [sibling(path) for path in self.folder.iterdir()]
        return type("Info", (), {"sha": "c0ffee", "siblings": found})()

    def hf_hub_url(self, name: str, file: str, *, revision: str) -> str:
        return f"http://hub/{name}/resolve/{revision}/{file}"

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer token"
        assert "/resolve/c0ffee/" in request.url.path, (
            "of the commit that was listed, whatever main is now"
        )
        self.ranges.append(request.headers["range"])
        first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        data = (self.folder / request.url.path.rsplit("/", 1)[1]).read_bytes()
        return httpx.Response(206, content=data[first : last + 1])


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(places.model(tmp_path / "m"))


def source(hub: Hub) -> sources.Repository:
    client = httpx.Client(transport=httpx.MockTransport(hub.answer))
    return sources.Repository(weights.parse(URI), hub, client)


def test_a_commit_is_staged_and_compared_with_what_the_hub_knows(hub: Hub, tmp_path: Path) -> None:
    where = store.Store(tmp_path / "disk")
    order = task.Order(URI, chunk=256)
    done = staging.Staging(order, source(hub), where).run()
    for path in hub.folder.iterdir():
        assert (where.models(done.key) / path.name).read_bytes() == path.read_bytes()
    assert len(hub.ranges) > len(list(hub.folder.iterdir()))
    hub.lie = True
    with pytest.raises(weights.WeightsError, match="its SHA-256 is"):
        staging.Staging(order, source(hub), store.Store(tmp_path / "other")).run()


def test_a_hub_that_is_down_is_waited_for_and_a_refusal_is_not(hub: Hub) -> None:
    hub.down = True
    with pytest.raises(sources.SourceDown, match="no route"):
        source(hub).files()
    refusing = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(401)))
    with pytest.raises(weights.WeightsError, match=r"HTTP 401; .*HF_TOKEN_PATH"):
        sources.Repository(weights.parse(URI), hub, refusing).read("config.json", 0, 8)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(weights.WeightsError, match=r"install forebay\[hub\] on the nodes"):
        sources.of(weights.parse(URI), task.Options())
