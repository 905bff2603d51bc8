"""Rollouts between real vLLM versions on a real Slurm cluster, under load; nobody notices."""

import json
from pathlib import Path

import pytest

from engines import tinymodel
from tests import realslurm
from tests.bench import models_vllm
from tests.contract import engine_vllm


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_a_slow_and_a_dying_version_go_back_and_a_good_one_takes_over() -> None:
    realslurm.require_slurm()
    engine_vllm.require(engine_vllm.NEWEST)
    found = models_vllm.measure(1)
    print(json.dumps(found))
    assert found["failures"] == []
    assert found["failed_requests"] == 0
    assert found["requests"] > 100
    assert {name: one["outcome"] for name, one in found["automatic"].items()} == {
        "failing": "rolled back",
        "slow": "rolled back",
    }
    assert found["rollout"] == "done"
    assert found["rollback_s"]["most"] < 2.0


def test_a_deeper_model_has_every_layer_as_often(tmp_path: Path) -> None:
    tiny, deep = tmp_path / "tiny", tmp_path / "deep"
    tinymodel.main([str(tiny)])
    models_vllm.deepened(tiny, deep, 3)
    heads = [_head(folder) for folder in (tiny, deep)]
    layers = [{name for name in head if ".layers." in name} for head in heads]
    assert len(layers[1]) == 3 * len(layers[0])
    size = max(each["data_offsets"][1] for each in heads[1].values() if "data_offsets" in each)
    (file,) = deep.glob("*.safetensors")
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + length + size


def _head(folder: Path) -> dict[str, dict[str, list[int]]]:
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    found: dict[str, dict[str, list[int]]] = json.loads(
        raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    )
    return found
