"""A version is looked at before it is registered: its weights' headers, its manifest, its arguments."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from engines import settings
from engines.weights import examine, sources
from forebay import inspecting
from scheduler.contracts import fleet, ports, weights
from scheduler.runtime import commands
from scheduler.runtime.models import document
from tests.unit.weights import places


def look(spec: fleet.ReplicaSpec, **options: str) -> str:
    return inspecting.Inspector(settings.EnginesSettings(**options)).version(spec)  # type: ignore[arg-type]


@pytest.fixture
def spec(tmp_path: Path) -> fleet.ReplicaSpec:
    place = places.model(tmp_path / "m")
    return fleet.ReplicaSpec("m", "v1", fleet.EngineKind.VLLM, f"file://{place}")


def test_a_whole_model_passes_staged_or_where_it_lies(
    spec: fleet.ReplicaSpec, tmp_path: Path
) -> None:
    assert look(spec) == ""
    assert look(dataclasses.replace(spec, weights=str(tmp_path / "m"))) == ""


def test_what_can_not_be_loaded_is_refused(spec: fleet.ReplicaSpec, tmp_path: Path) -> None:
    changed = dataclasses.replace
    assert "no such folder" in look(changed(spec, weights=f"file://{tmp_path}/none"))
    assert "write an absolute folder" in look(changed(spec, weights="models/m"))
    assert "write hf://owner/name@revision" in look(changed(spec, weights="hf://a/b"))
    assert "is its file system mounted" in look(changed(spec, weights="file:///nowhere/at/all"))
    assert "a replica has one port" in look(changed(spec, engine_args={"port": 80}))
    (tmp_path / "m" / "model-00002-of-00003.safetensors").write_bytes(b"short")
    assert "cut off (5 bytes): upload it again" in look(spec)


def test_what_is_larger_than_a_node_must_spread_over_several(spec: fleet.ReplicaSpec) -> None:
    judge = inspecting.Inspector(settings.EnginesSettings(), node_gpus=8).version
    wide = {"tensor-parallel-size": 8, "pipeline-parallel-size": 2}
    assert judge(dataclasses.replace(spec, gpus=16, engine_args=wide)) == ""
    assert "set it to 8 and pipeline parallel to 2" in judge(
        dataclasses.replace(spec, gpus=16, engine_args={"tensor-parallel-size": 16})
    )
    odd = dataclasses.replace(spec, gpus=9)
    for engine in (fleet.EngineKind.VLLM, fleet.EngineKind.SIMULATED):
        fault = judge(dataclasses.replace(odd, engine=engine))
        assert fault == "9 GPUs do not spread evenly over 2 nodes: take a multiple"
    attached = dataclasses.replace(odd, engine=fleet.EngineKind.HTTP, weights="http://h:1")
    assert "an external server goes over no nodes" in judge(attached)
    assert judge(dataclasses.replace(spec, gpus=0)) == ""
    parts = fleet.Hardware(gres="shard", parts=16)
    assert judge(dataclasses.replace(spec, gpus=9, hardware=parts)) == ""


def test_an_adapter_of_a_version_over_nodes_lies_where_all_of_them_see_it(
    spec: fleet.ReplicaSpec, tmp_path: Path
) -> None:
    judge = inspecting.Inspector(settings.EnginesSettings(), (str(tmp_path),), 8).adapter
    staged = document.Adapter(path=f"file://{tmp_path}/law")
    wide = dataclasses.replace(spec, gpus=16)
    assert "give it a plain folder that all nodes see" in judge(staged, [spec, wide])
    assert "all nodes see" not in judge(staged, [spec])
    plain = document.Adapter(path=str(tmp_path / "law"))
    assert "all nodes see" not in judge(plain, [wide])


def test_a_digest_must_be_that_of_the_manifest(spec: fleet.ReplicaSpec, tmp_path: Path) -> None:
    wanted = dataclasses.replace(spec, weights_digest="0" * 64)
    assert "make it with `fctl weights manifest`" in look(wanted)
    place = tmp_path / "m"
    made = examine.manifest(sources.Folder(place), str(place))
    (place / weights.MANIFEST).write_text(made.text())
    assert "take that, or put the right files there" in look(wanted)
    assert look(dataclasses.replace(spec, weights_digest=made.digest)) == ""


@pytest.mark.parametrize("stored", ["as config.json says", "as its tensors are"])
def test_weights_in_fp8_need_an_approval_too(
    spec: fleet.ReplicaSpec, tmp_path: Path, stored: str
) -> None:
    """vLLM loads them as they are: no option of the version says fp8."""
    place = tmp_path / "m"
    if stored == "as config.json says":
        said = {**places.CONFIG, "quantization_config": {"quant_method": "fp8"}}
        (place / "config.json").write_text(json.dumps(said))
    else:
        for path in place.glob("model*"):
            path.unlink()
        raw = places.shard(places.tensors(), dtype="F8_E4M3", width=1)
        (place / "model.safetensors").write_bytes(raw)
    told = look(spec)
    assert "these weights are fp8" in told
    assert "name who has allowed it" in told
    assert look(dataclasses.replace(spec, tuning={"quantization_approval": "Ada, 2026-11"})) == ""


def test_scales_of_another_format_are_no_fp8(spec: fleet.ReplicaSpec, tmp_path: Path) -> None:
    scales = places.shard({"model.layers.0.mlp.down_proj.weight_scale": (8,)}, 1, "F8_E8M0", 1)
    (tmp_path / "m" / "scales.safetensors").write_bytes(scales)
    assert look(spec) == ""


def test_the_model_that_guesses_is_looked_at_too(spec: fleet.ReplicaSpec, tmp_path: Path) -> None:
    def drafted(folder: Path) -> str:
        guess = {"method": "draft", "model": str(folder)}
        return look(dataclasses.replace(spec, tuning={"speculative": guess}))

    draft = places.model(tmp_path / "draft")
    assert drafted(draft) == ""
    assert "no such folder" in drafted(tmp_path / "none")
    (draft / "model-00003-of-00003.safetensors").write_bytes(b"short")
    assert "cut off (5 bytes): upload it again" in drafted(draft)


def test_the_engines_own_parser_has_the_last_word(spec: fleet.ReplicaSpec, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncat >/dev/null\necho \'{"fault": "vLLM says: no such option"}\'\n'
    )
    python.chmod(0o700)
    assert look(spec, vllm_python=str(python)) == "vLLM says: no such option"
    python.write_text("#!/bin/sh\nexit 3\n")
    assert "could not be asked" in look(spec, vllm_python=str(python))

    def blind(**options: str) -> str:
        return inspecting.Inspector(settings.EnginesSettings(**options)).blind(spec)  # type: ignore[arg-type]

    assert blind(vllm_python=str(python)) == ""
    assert "its first replica will tell" in blind()


def test_a_manifest_is_made_where_the_weights_are_and_staging_takes_it(
    spec: fleet.ReplicaSpec, tmp_path: Path
) -> None:
    options = settings.EnginesSettings()
    found = inspecting.look(spec.weights, options, manifest=False, write=False)
    assert (found["dtypes"], found["parameters"]) == ("F32", 512)
    made = inspecting.look(spec.weights, options, manifest=True, write=True)
    assert look(dataclasses.replace(spec, weights_digest=made["digest"])) == ""
    with pytest.raises(weights.WeightsError, match="try again when it answers"):
        inspecting.look("file:///nowhere/at/all", options, manifest=False, write=False)


def test_the_command_looks_from_here(spec: fleet.ReplicaSpec) -> None:
    def looker(place: str, *, manifest: bool, write: bool) -> dict[str, object]:
        return inspecting.look(place, settings.EnginesSettings(), manifest=manifest, write=write)  # type: ignore[return-value]

    def fctl(*words: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        code = commands.fctl(
            ["weights", *words], api=NoApi(), out=out, err=err, here=commands.Here(looker=looker)
        )
        return code, out.getvalue() + err.getvalue()

    assert fctl("check", spec.weights)[0] == 0
    code, told = fctl("manifest", spec.weights, "--json")
    assert code == 0
    assert len(json.loads(told)["digest"]) == 64
    code, told = fctl("check", "s3://bucket")
    assert (code, told) == (1, "fctl: error: weights 's3://bucket': write s3://bucket/prefix\n")


class NoApi:
    """A gateway that is not there."""

    def call(self, method: str, path: str, **options: Any) -> ports.ApiResponse:
        raise AssertionError("no gateway is needed")
