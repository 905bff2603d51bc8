"""Weights that are missing, cut off, of another shape, or pickled: refused with the reason and the fix."""

import json
from pathlib import Path

import pytest

from engines import tinymodel
from engines.weights import examine, sources
from scheduler.contracts import weights
from tests.unit.weights import places


def judge(place: Path, *, unsafe: bool = False) -> examine.Summary:
    source = sources.Folder(place)
    sizes = {one.name: one.size for one in source.files()}
    return examine.examine(sizes, source.read, str(place), unsafe=unsafe)


def test_a_whole_model_passes_and_its_code_and_pictures_stay_behind(tmp_path: Path) -> None:
    place = places.model(tmp_path / "m")
    for name in ("modeling.py", "README.md", "pytorch_model.bin", ".gitattributes"):
        (place / name).write_text("x")
    found = judge(place)
    assert [name for name in found.names if name.endswith(".safetensors")] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    assert not {"modeling.py", "README.md", "pytorch_model.bin", ".gitattributes"} & set(
        found.names
    )
    assert found.dtypes == ("F32",)


def test_the_tiny_model_passes(tmp_path: Path) -> None:
    tinymodel.make(tmp_path / "tiny")
    assert 1_600_000 < judge(tmp_path / "tiny").parameters < 1_900_000


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda m: (m / "model-00002-of-00003.safetensors").unlink(), "00002-of-00003.safetensors missing"),
        (lambda m: _cut(m / "model-00001-of-00003.safetensors", 10), "cut off or damaged, upload it again"),
        (lambda m: _cut(m / "model-00001-of-00003.safetensors", None), r"cut off \(5 bytes\): upload"),
        (lambda m: (m / "model-00001-of-00003.safetensors").write_bytes(b"\xff" * 64), "no safetensors"),
        (lambda m: _config(m, hidden_size=16), r"embed_tokens.weight is \[16, 8\].*makes it \[16, 16\]"),
        (lambda m: _config(m, num_hidden_layers=3), "says 3 layers and layer 2 has no weights"),
        (lambda m: _config(m, num_key_value_heads=2), r"k_proj.weight is \[4, 8\].*\[8, 8\]"),
        (lambda m: (m / "config.json").unlink(), "config.json is missing"),
        (lambda m: (m / "config.json").write_text("{"), "not JSON"),
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)  # fmt: skip
def test_what_vllm_would_stumble_over_is_refused_before_a_transfer(
    tmp_path: Path, spoil: object, why: str
) -> None:
    place = places.model(tmp_path / "m")
    assert callable(spoil)
    spoil(place)
    with pytest.raises(weights.WeightsError, match=why):
        judge(place)


def _cut(path: Path, off: int | None) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:5] if off is None else data[:-off])


def _config(place: Path, **changes: int) -> None:
    (place / "config.json").write_text(json.dumps({**places.CONFIG, **changes}))


def test_what_is_hidden_at_its_place_is_never_taken() -> None:
    """Objects of a bucket: names like ours would overwrite what a staging keeps of itself."""
    sizes = dict.fromkeys(
        ("m.safetensors", "config.json", ".forebay-ledger", ".cache/x.json", "a/.b/c.json"), 1
    )
    assert examine.chosen(sizes, "s3://b/m", unsafe=True) == ("config.json", "m.safetensors")


def test_pickles_need_the_sites_word(tmp_path: Path) -> None:
    place = places.model(tmp_path / "m", shards=1)
    for path in place.glob("model*"):
        path.unlink()
    (place / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(weights.WeightsError, match=r"is a pickle, which can run code .* convert"):
        judge(place)
    assert "pytorch_model.bin" in judge(place, unsafe=True).names
    (place / "pytorch_model.bin").unlink()
    with pytest.raises(weights.WeightsError, match=r"no \*.safetensors there"):
        judge(place, unsafe=True)


@pytest.mark.parametrize(
    "text",
    [
        "model", "http://host/model", "s3://bucket", "s3://key:secret@bucket/m", "file://relative",
        "file:///", "file:///a/../b", "hf://owner/name", "hf://owner", "s3://b/m?x=1", "ftp://a/b",
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(weights.WeightsError) as caught:
        weights.parse(text)
    assert "secret" not in str(caught.value)
    assert (
        "write" in str(caught.value)
        or "credential" in str(caught.value)
        or "no query" in str(caught.value)
    )


@pytest.mark.parametrize("text", ["file:///shared/m", "s3://bucket/a/b", "hf://owner/name@0123abc"])
def test_a_place_is_written_as_it_is_read(text: str) -> None:
    assert str(weights.parse(text)) == text
    assert weights.staged(text)
    assert not weights.staged("/shared/m")
