"""What can't be served is refused when it is declared, with the place, the reason and the fix in one line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import settings, tinymodel
from forebay import inspecting
from scheduler.contracts import clock, errors
from scheduler.runtime.models import document, service
from tests import registries

NODES = [
    {
        "name": "n1", "gres_type": "A100", "gpus": 4, "memory_mb": 500_000, "features": ["nvlink"],
        "shared": {},
    },
]  # fmt: skip
WISH = service.Wish("ada")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a whole model, one cut off, one whose config.json is another's, a classifier."""
    folder = tmp_path_factory.mktemp("weights")
    tinymodel.make(folder / "whole")
    for name in ("cut", "other"):
        shutil.copytree(folder / "whole", folder / name)
    file = folder / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    config = folder / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 256}))
    tinymodel.make_classifier(folder / "judge", labels=["a", "b"])
    return folder


@pytest.fixture
def site(weights: Path, tmp_path: Path) -> Iterator[service.Site]:
    """Return a site with a model of one version, and one node that Slurm has told of."""
    registry = registries.opened(tmp_path)
    epoch = registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    registry.journal.set_facts(epoch, 1, {"nodes": {"nodes": NODES}})
    inspector = inspecting.Inspector(settings.EnginesSettings())
    made = service.Site(registry, clock.FakeClock(), inspector)
    service.add(made, ("model", "m", ""), {}, WISH)
    service.add(made, ("version", "m", "v1"), {"weights": str(weights / "whole")}, WISH)
    yield made
    registry.close()


VERSIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"weights": "HERE/none"},
        "models.m.versions.v2: HERE/none: no such folder; correct the version's weights",
    ),
    (
        {"weights": "HERE/cut"},
        "models.m.versions.v2: HERE/cut/model.safetensors: 6643064 bytes, but its header declares "
        "6644064: cut off or damaged, upload it again",
    ),
    (
        {"weights": "HERE/other"},
        "models.m.versions.v2: HERE/other: model.embed_tokens.weight is [960, 192], and config.json "
        "makes it [960, 256]: these are not one model's files; upload config.json and weights of the "
        "same version",
    ),
    (
        {"weights": "HERE/whole", "engine_args": {"port": 8000}},
        "models.m.versions.v2: model m: engine_args port is refused: a replica has one port, which "
        "Forebay opens",
    ),
    (
        {"weights": "HERE/whole", "engine_args": {"trust-remote-code": True}},
        "models.m.versions.v2: model m: engine_args trust-remote-code is refused: it could run code or "
        "read files for a request",
    ),
    (
        {"weights": "HERE/whole", "runner": "embed"},
        "models.m.versions.v2.runner: embed, and v1 is generate: all versions of a model do the same; "
        "declare another model",
    ),
    (
        {"weights": "HERE/whole", "runner": "judge"},
        "version m v2.runner: Input should be 'generate', 'embed' or 'classify' (got 'judge')",
    ),
]
PROFILES: list[tuple[dict[str, Any], str]] = [
    ({"gpus": 9}, "profiles.p.gpus 9: the largest node has 4; lower it"),
    ({"gres_type": "H200"}, "profiles.p.gres_type H200: no node has it; nodes have A100"),
    ({"memory_gb": 900}, "profiles.p.memory_gb 900: the largest such node has 524; lower it"),
    (
        {"constraint": "ib"},
        "profiles.p.constraint ib: no node has the feature ib; nodes have nvlink",
    ),
    (
        {"gres": "shard:1", "parts": 4},
        "profiles.p.gres shard:1: no node has shard; add it to GresTypes, the nodes' Gres and "
        "gres.conf, or take whole GPUs",
    ),
]
ROUTES: list[tuple[dict[str, int], str]] = [
    ({"v1": 60}, "models.m.route: percentages add up to 60: make it 100"),
    ({"v1": 60, "v9": 40}, "models.m.route.versions.v9: unknown version; known are: v1"),
]


def refused(site: service.Site, key: document.Key, body: dict[str, Any]) -> str:
    """Return the one line in which something is refused; nothing of it is written."""
    before = site.registry.declared.read()[0]
    ask = service.update if key[0] == "route" else service.add
    with pytest.raises(errors.BadRequest) as error:
        ask(site, key, body, WISH)
    assert site.registry.declared.read()[0] == before
    return str(error.value)


@pytest.mark.parametrize(("body", "said"), VERSIONS)
def test_a_version_that_could_not_run(
    site: service.Site, weights: Path, body: dict[str, Any], said: str
) -> None:
    here = {**body, "weights": body["weights"].replace("HERE", str(weights))}
    told = refused(site, ("version", "m", "v2"), here)
    assert told == said.replace("HERE", str(weights))


@pytest.mark.parametrize(("body", "said"), PROFILES)
def test_a_profile_that_no_node_satisfies(
    site: service.Site, body: dict[str, Any], said: str
) -> None:
    assert refused(site, ("profile", "", "p"), body) == said


@pytest.mark.parametrize(("versions", "said"), ROUTES)
def test_a_route_that_leads_nowhere(
    site: service.Site, versions: dict[str, int], said: str
) -> None:
    assert refused(site, ("route", "m", ""), {"versions": versions}) == said


def test_models_of_each_kind_are_taken(site: service.Site, weights: Path) -> None:
    for runner, folder in (("embed", "whole"), ("classify", "judge")):
        service.add(site, ("model", runner, ""), {}, WISH)
        body = {"weights": str(weights / folder), "runner": runner}
        service.add(site, ("version", runner, "v1"), body, WISH)
    found = {each.spec.model: each.spec for each in site.registry.catalog.deployments()}
    assert dict(found["classify"].engine_args) == {"runner": "pooling", "convert": "classify"}
    assert dict(found["embed"].engine_args) == {"runner": "pooling", "convert": "embed"}
    routes = site.registry.catalog.routes()
    assert [routes[name].runner for name in ("m", "embed", "classify")] == [
        "generate", "embed", "classify",
    ]  # fmt: skip
