"""Small models at places: a folder, and sources that fail on demand."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.weights import sources

HIDDEN, VOCABULARY, LAYERS, INNER = 8, 16, 2, 12
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tensors() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return found


def shard(
    shapes: Mapping[str, tuple[int, ...]], filler: int = 1, dtype: str = "F32", width: int = 4
) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = width
        for part in shape:
            size *= part
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes([filler]) * at


def model(folder: Path, *, shards: int = 3) -> Path:
    """Write a model in several shards, with index, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    every = list(tensors().items())
    places: dict[str, str] = {}
    for n in range(shards):
        name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(every[n::shards])
        places |= dict.fromkeys(part, name)
        (folder / name).write_bytes(shard(part, n + 1))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


class Flaky(sources.Folder):
    """A folder whose reads are counted, and fail or lie on demand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.down = False
        self.reads: list[tuple[str, int, int]] = []
        self.damage: dict[str, int] = {}

    def files(self) -> tuple[sources.Found, ...]:
        if self.down:
            raise sources.SourceDown("the store does not answer")
        return super().files()

    def read(self, name: str, start: int, length: int) -> bytes:
        if self.down:
            raise sources.SourceDown("the store does not answer")
        self.reads.append((name, start, length))
        data = super().read(name, start, length)
        if self.damage.get(name, 0) > 0 and start >= 256:  # headers are read whole
            self.damage[name] -= 1
            data = b"\0" * len(data)
        return data
