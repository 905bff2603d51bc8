"""An adapter is looked at before it is registered."""

import dataclasses
import json
from pathlib import Path

import pytest

from engines import lora, tinymodel
from scheduler.contracts import fleet


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    tinymodel.make_lora(folder / "law")
    return folder


def copy(made: Path, target: Path) -> Path:
    target.mkdir()
    for name in (lora.CONFIG, lora.TENSORS):
        (target / name).write_bytes((made / "law" / name).read_bytes())
    return target


def test_a_sound_adapter_tells_its_rank(made: Path, tmp_path: Path) -> None:
    rank = lora.judge(made / "law", 0, [], [str(made)])
    assert lora.judge(made / "law", rank, []) == rank


def test_what_is_wrong_is_named(made: Path, tmp_path: Path) -> None:
    rank = lora.judge(made / "law", 0, [])
    with pytest.raises(lora.AdapterError, match=f"rank {rank + 1} is said, and .* has r = {rank}"):
        lora.judge(made / "law", rank + 1, [])
    with pytest.raises(lora.AdapterError, match="put the adapter's folder there"):
        lora.judge(tmp_path / "none", 0, [])
    link = tmp_path / "link"
    link.symlink_to(made / "law")
    with pytest.raises(lora.AdapterError, match="outside the allowed folders"):
        lora.judge(link, 0, [], [str(tmp_path)])
    cut = copy(made, tmp_path / "cut")
    whole = (cut / lora.TENSORS).read_bytes()
    (cut / lora.TENSORS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(lora.AdapterError, match=lora.TENSORS):
        lora.judge(cut, 0, [])
    (cut / lora.TENSORS).unlink()
    with pytest.raises(lora.AdapterError, match="safetensors only"):
        lora.judge(cut, 0, [])
    for change, said in (
        ({"peft_type": "IA3"}, "peft_type is not LORA"),
        ({"r": 0}, "r = 0 is no rank"),
        ({"r": rank + 1}, f"has rank {rank}, and"),
        ({"use_dora": True}, "use_dora is set"),
    ):
        folder = copy(made, tmp_path / said.replace(" ", "-").replace("/", ""))
        config = json.loads((folder / lora.CONFIG).read_text())
        (folder / lora.CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(lora.AdapterError, match=said):
            lora.judge(folder, 0, [])


def test_another_base_is_refused(made: Path, tmp_path: Path) -> None:
    config = tmp_path / "model"
    tinymodel.make(config)
    base = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.VLLM, weights=str(config))
    rank = lora.judge(made / "law", 0, [base])
    with pytest.raises(lora.AdapterError, match="takes max-lora-rank 1: raise that"):
        lora.judge(made / "law", 0, [dataclasses.replace(base, engine_args={"max-lora-rank": 1})])
    assert rank > 1
    said = json.loads((config / "config.json").read_text())
    for change, told in (
        ({"num_hidden_layers": 1}, "it has a layer 1, that has 1"),
        ({"hidden_size": 2 * said["hidden_size"], "head_dim": 8}, "wide there, not"),
    ):
        (config / "config.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(lora.AdapterError, match=told):
            lora.judge(made / "law", 0, [base])
