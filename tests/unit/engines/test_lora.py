"""An adapter is looked at before it is registered."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from engines import lora, tinymodel
from engines.weights import sources
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


def test_a_base_that_is_staged_is_looked_at_where_it_lies(made: Path, tmp_path: Path) -> None:
    """Its folder is none of this host's: an adapter of another base was taken, and failed on each node."""
    place = tmp_path / "model"
    tinymodel.make(place)
    base = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.VLLM, weights=f"file://{place}")
    lora.judge(made / "law", 0, [base])
    lora.judge_place(sources.Folder(made / "law"), "s3://adapters/law", 0, [base])
    said = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**said, "num_hidden_layers": 1}))
    with pytest.raises(lora.AdapterError, match="it has a layer 1, that has 1"):
        lora.judge(made / "law", 0, [base])
    away = dataclasses.replace(base, weights="file:///nowhere/at/all")
    with pytest.raises(sources.SourceDown, match="is its file system mounted"):
        lora.judge(made / "law", 0, [away])
    lora.judge(made / "law", 0, [dataclasses.replace(base, weights="/nowhere/at/all")])


def test_an_adapter_of_parts_that_the_base_lacks_is_refused(made: Path, tmp_path: Path) -> None:
    """vLLM passes over them, and its requests would be answered by the base model."""
    tinymodel.make(tmp_path / "model")
    base = fleet.ReplicaSpec("chat", "v1", fleet.EngineKind.VLLM, weights=str(tmp_path / "model"))
    other = copy(made, tmp_path / "other")
    raw = (other / lora.TENSORS).read_bytes()
    assert b"o_proj" in raw
    (other / lora.TENSORS).write_bytes(raw.replace(b"o_proj", b"z_proj"))
    with pytest.raises(lora.AdapterError, match="it changes z_proj, which that does not have"):
        lora.judge(other, 0, [base])


def test_an_adapter_is_judged_where_it_will_be_staged_from(made: Path, tmp_path: Path) -> None:
    source = sources.Folder(made / "law")
    rank = lora.judge(made / "law", 0, [])
    assert lora.judge_place(source, "s3://adapters/law", rank, []) == rank
    with pytest.raises(lora.AdapterError, match=r"s3://adapters/law/adapter_config.json has r ="):
        lora.judge_place(source, "s3://adapters/law", rank + 1, [])
    pickled = copy(made, tmp_path / "pickled")
    (pickled / lora.TENSORS).rename(pickled / "adapter_model.bin")
    with pytest.raises(lora.AdapterError, match="is a pickle"):
        lora.judge_place(sources.Folder(pickled), "s3://adapters/law", 0, [])
    tinymodel.make(tmp_path / "model")
    with pytest.raises(lora.AdapterError, match=r"adapter_config\.json is missing"):
        lora.judge_place(sources.Folder(tmp_path / "model"), "s3://models/chat", 0, [])


@pytest.mark.parametrize("name", [lora.CONFIG, lora.TENSORS])
def test_a_pipe_in_place_of_a_file_holds_up_nobody(made: Path, tmp_path: Path, name: str) -> None:
    folder = copy(made, tmp_path / "pipe")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(lora.AdapterError, match=f"{name}: is no file"):
        lora.judge(folder, 0, [])
