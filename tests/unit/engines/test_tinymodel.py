"""The tiny model: the same bytes each time, any text comes back, files that fit together."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from engines import tinymodel

WEIGHTS = "e601de9605bd18ca"
TOKENIZER = "a39636f9bf12e823"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    assert tinymodel.main([str(path), "--lora", "a", "--lora", "b"]) == 0
    return path


def digest(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


def header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the safetensors header and the number of data bytes after it."""
    raw = file.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    fields: dict[str, Any] = json.loads(raw[8 : 8 + size])
    fields.pop("__metadata__")
    return fields, len(raw) - 8 - size


def encode(spec: dict[str, Any], text: str) -> list[int]:
    """Byte-level BPE of one word, by the ranks in ``tokenizer.json``."""
    letters = [letter for letter, n in spec["model"]["vocab"].items() if n < 256]
    symbols = [letters[byte] for byte in text.encode()]
    for left, right in spec["model"]["merges"]:
        at = 0
        while at < len(symbols) - 1:
            if symbols[at : at + 2] == [left, right]:
                symbols[at : at + 2] = [left + right]
            at += 1
    return [spec["model"]["vocab"][symbol] for symbol in symbols]


def decode(spec: dict[str, Any], ids: list[int]) -> str:
    names = {n: letter for letter, n in spec["model"]["vocab"].items()}
    letters = [letter for letter, n in spec["model"]["vocab"].items() if n < 256]
    return bytes(letters.index(letter) for n in ids for letter in names[n]).decode()


def test_equal_arguments_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    tinymodel._merges.cache_clear()  # learned anew
    tinymodel.make(tmp_path / "again")
    tinymodel.make_lora(tmp_path / "lora", seed=1)

    assert digest(tmp_path / "again") == digest(folder)
    assert digest(tmp_path / "lora") == digest(folder.with_name("tiny-a"))


def test_the_weights_are_these_on_every_machine(folder: Path) -> None:
    # Pinned: a change of the generator changes every recorded answer, so it must be meant.
    assert digest(folder)["model.safetensors"][:16] == WEIGHTS
    assert digest(folder)["tokenizer.json"][:16] == TOKENIZER


def test_another_seed_is_another_model(folder: Path, tmp_path: Path) -> None:
    tinymodel.make(tmp_path / "other", seed=7)

    assert digest(tmp_path / "other")["model.safetensors"] != digest(folder)["model.safetensors"]
    assert digest(tmp_path / "other")["tokenizer.json"] == digest(folder)["tokenizer.json"]
    assert digest(folder.with_name("tiny-a")) != digest(folder.with_name("tiny-b"))


def test_shapes_fit_the_configuration(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors, size = header(folder / "model.safetensors")

    values = sum(end - start for start, end in (t["data_offsets"] for t in tensors.values())) // 4
    assert 4 * values == size
    assert 1_500_000 < values < 1_900_000
    assert tensors["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert (
        len([name for name in tensors if name.endswith("q_proj.weight")])
        == (config["num_hidden_layers"])
    )


def test_the_vocabulary_is_dense_and_holds_every_byte(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())

    ids = sorted([*spec["model"]["vocab"].values(), *(t["id"] for t in spec["added_tokens"])])
    assert ids == list(range(config["vocab_size"]))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] in {token["id"] for token in spec["added_tokens"]}


@pytest.mark.parametrize("text", ["forebay", "naïve", "漢字", "🦀", "\x00\x7f", "ÿ"])
def test_any_text_comes_back(folder: Path, text: str) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())

    assert decode(spec, encode(spec, text)) == text


def test_frequent_words_are_few_tokens(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())

    assert len(encode(spec, " water")) == 1


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="make it longer"):
        tinymodel._train("ab ab", 100)
