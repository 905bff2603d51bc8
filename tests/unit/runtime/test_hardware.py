"""A profile that no node can satisfy is refused."""

from typing import Any

import pytest

from scheduler.contracts import clock, errors, fleet
from scheduler.runtime import config
from scheduler.runtime.models import compiled, document, hardware, imported, service
from scheduler.runtime.registry import store

NODES: list[dict[str, Any]] = [
    {"name": "n1", "gres_type": "A100", "gpus": 4, "memory_mb": 500_000},
    {"name": "n2", "gres_type": "H100", "gpus": 8, "memory_mb": 2_000_000},
    {"name": "n3", "gres_type": "", "gpus": None, "memory_mb": 0},
]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (document.Profile(gres_type="h100", gpus=8, memory_gb=2000), ""),
        (document.Profile(gpus=9), ""),  # of n3 nothing is known
    ],
)
def test_what_may_fit_is_taken(profile: document.Profile, said: str) -> None:
    assert hardware.fault(profile, NODES) == said
    assert hardware.fault(profile, []) == ""


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (document.Profile(gres_type="B200"), "no node has it; nodes have A100, H100"),
        (document.Profile(gres_type="A100", gpus=8), "the largest node has 4"),
        (document.Profile(gpus=8, memory_gb=3000), "the largest such node has 2097"),
    ],
)
def test_what_fits_nowhere_is_refused_with_what_there_is(
    profile: document.Profile, said: str
) -> None:
    assert said in hardware.fault(profile, NODES[:2])


APART: list[dict[str, Any]] = [
    {"name": "n1", "gres_type": "A100", "gpus": 8, "cpus": 64, "features": ["nvlink"], "memory_mb": 500_000},
    {"name": "n2", "gres_type": "H100", "gpus": 4, "cpus": 32, "features": ["ib"], "memory_mb": 2_000_000},
]  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (document.Profile(gres_type="A100", gpus=8, constraint="nvlink", cpus=64), ""),
        (document.Profile(gres_type="A100", constraint="nvlink|ib"), ""),
        (
            document.Profile(gres_type="A100", constraint="ib"),
            "constraint ib: no node that has the rest has it; leave one out",
        ),
        (document.Profile(gpus=8, memory_gb=1000), "memory_gb 1000: the largest such node has 524"),
        (document.Profile(gpus=0, cpus=65), "cpus 65: the largest such node has 64; lower it"),
        (document.Profile(gres_type="H100", cpus=33), "cpus 33: the largest such node has 32"),
    ],
)
def test_one_and_the_same_node_must_have_all_of_it(profile: document.Profile, said: str) -> None:
    found = hardware.fault(profile, APART)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (document.Profile(gpus=16, memory_gb=1000, cpus=128), ""),
        (document.Profile(gpus=12, memory_gb=1000, cpus=127), ""),
        (document.Profile(gpus=16, memory_gb=1100), "memory_gb 550: the largest such node has 524"),
        (document.Profile(gpus=16, cpus=130), "cpus 65: the largest such node has 64; lower it"),
        (document.Profile(gpus=16, gres_type="H100"), "gpus 8: the largest node has 4; lower it"),
    ],
)
def test_what_is_larger_than_a_node_asks_a_share_of_each(
    profile: document.Profile, said: str
) -> None:
    found = hardware.fault(profile, APART, 8)
    assert found.startswith(said)
    assert bool(found) == bool(said)


SHARDED: list[dict[str, Any]] = [
    {"name": "n1", "gpus": 4, "shared": {"shard": 16}, "features": ["nvlink", "a100"]},
    {"name": "n2", "gpus": 8, "shared": {}, "features": []},
]


@pytest.mark.parametrize(
    ("profile", "nodes", "said"),
    [
        (document.Profile(gres="shard:2", parts=4), SHARDED, ""),
        (document.Profile(constraint="nvlink&a100*2"), SHARDED, ""),
        (document.Profile(constraint="anything"), NODES, ""),  # Slurm tells no features
        (
            document.Profile(gres="shard:2", parts=8),
            SHARDED,
            "parts 8: a GPU here has 4 of shard; say so",
        ),
        (
            document.Profile(gres="mps:50"),
            SHARDED,
            "gres mps:50: no node has mps; add it to GresTypes, the nodes' Gres and gres.conf, "
            "or take whole GPUs",
        ),
        (
            document.Profile(constraint="nvlink|ib"),
            SHARDED,
            "constraint nvlink|ib: no node has the feature ib; nodes have a100, nvlink",
        ),
    ],
)
def test_parts_of_gpus_and_features_are_looked_for_too(
    profile: document.Profile, nodes: list[dict[str, Any]], said: str
) -> None:
    assert hardware.fault(profile, nodes) == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"gres": "gpu:2"},
            "profile small: gres gpu:2: write shard:N or mps:N; whole GPUs are `gpus`",
        ),
        (
            {"gres": "shard:0", "parts": 4},
            "profile small: gres shard:0: write shard:N or mps:N; whole GPUs are `gpus`",
        ),
        (
            {"gres": "shard:1"},
            "profile small: parts: missing: write how many shards a GPU has in gres.conf",
        ),
        (
            {"gres": "shard:5", "parts": 4},
            "profile small: gres shard:5: a GPU has 4 of them, and a job gets parts of one GPU; "
            "lower it, or take whole GPUs",
        ),
        ({"parts": 4}, "profile small: parts: only with gres shard:N or mps:N; leave it out"),
    ],
)
def test_a_gres_that_is_none_is_refused(
    registry: store.Registry, fake_clock: clock.FakeClock, fields: dict[str, Any], said: str
) -> None:
    site = service.Site(registry, fake_clock)
    with pytest.raises(errors.BadRequest) as refused:
        service.add(site, ("profile", "", "small"), fields, service.Wish("ada"))
    assert str(refused.value).startswith(said)


def test_a_profile_becomes_what_its_replicas_need() -> None:
    model = document.Model(versions={"v1": document.Version()})
    profile = document.Profile(gres="shard:2", parts=4, memory_gb=6, cpus=2, constraint="x")
    spec = compiled.spec("embed", "v1", model, profile)
    assert spec.gpus == 2
    assert spec.hardware == fleet.Hardware("shard", parts=4, memory_gb=6.0, cpus=2, constraint="x")
    assert compiled.hardware(document.Profile(gpus=0)).gres == "none"
    assert compiled.hardware(document.Profile(gres="mps:50")).parts == 100
    assert compiled.hardware(None) == fleet.ANY_NODE


@pytest.mark.parametrize(
    ("version", "gpus", "gres"),
    [
        ({"engine": "http", "weights": "http://h"}, 0, "none"),
        ({"engine": "http", "weights": "http://h", "gpus": 1}, 1, "gpu"),
        ({"engine": "simulated", "gpus": 0}, 0, "none"),
        ({"engine": "simulated"}, 1, "gpu"),
    ],
)
def test_what_computes_nothing_takes_no_gpu(version: dict[str, Any], gpus: int, gres: str) -> None:
    model = document.Model(versions={"v1": document.Version(**version)})
    spec = compiled.spec("m", "v1", model, None)
    assert (spec.gpus, spec.hardware.gres) == (gpus, gres)
    profile = document.Profile(gpus=2, gres_type="A100")
    assert compiled.spec("m", "v1", model, profile).hardware.gres_type == "A100"


def test_an_external_server_of_the_file_takes_no_gpu_either() -> None:
    lines = config.ModelSettings(name="m", engine=fleet.EngineKind.HTTP, weights="http://h")
    whole = document.whole(imported.of_file([lines]))
    assert compiled.spec("m", "v1", whole.models["m"], None).hardware.gres == "none"


def test_it_is_asked_at_registration(registry: store.Registry, fake_clock: clock.FakeClock) -> None:
    epoch = registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    registry.journal.set_facts(epoch, 1, {"nodes": {"nodes": NODES[:2]}})
    site = service.Site(registry, fake_clock)
    with pytest.raises(errors.BadRequest, match=r"profiles.big.gpus 16: the largest node"):
        service.add(site, ("profile", "", "big"), {"gpus": 16}, service.Wish("ada"))
    service.add(site, ("profile", "", "big"), {"gpus": 8}, service.Wish("ada"))
