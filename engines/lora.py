"""Judges a LoRA adapter before it is registered: its files are whole, its rank is said, its base is ours.

Reads the configuration and the safetensors header alone; nothing of it is ever run.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.weights import examine
from scheduler.contracts import fleet, weights

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_MOST_CONFIG = 1_000_000  # bytes
_PART = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(\w+)\.lora_(A|B)\.(?:\w+\.)?weight$")
# What a projection reads and writes, by the base's own config.json; others are judged by their rank alone.
_READS = {"q_proj": "hidden", "k_proj": "hidden", "v_proj": "hidden", "gate_proj": "hidden",
          "up_proj": "hidden", "down_proj": "inner", "o_proj": "heads"}  # fmt: skip
_WRITES = {"q_proj": "heads", "k_proj": "kv", "v_proj": "kv", "gate_proj": "inner",
           "up_proj": "inner", "down_proj": "hidden", "o_proj": "hidden"}  # fmt: skip


class AdapterError(ValueError):
    """The adapter can't be used; the message is one line: what, where, what to do."""


def judge(
    path: Path, rank: int, bases: Iterable[fleet.ReplicaSpec], folders: Sequence[str] = ()
) -> int:
    """Return an adapter's rank once it is seen to be whole, of that rank, and of the bases' shapes.

    Args:
        path: its folder.
        rank: said at registration; 0: whatever the files say.
        bases: the versions that it shall run on.
        folders: that it must lie in, links followed; none: anywhere.

    Raises:
        AdapterError: anything is wrong with it.
    """
    real = _within(path, folders)
    config = _config(real / CONFIG)
    found = _rank(config, path)
    if rank and rank != found:
        raise AdapterError(f"rank {rank} is said, and {path / CONFIG} has r = {found}: say that")
    tensors = _tensors(real / TENSORS)
    parts = {match: shape for name, shape in tensors.items() if (match := _PART.search(name))}
    if not parts:
        raise AdapterError(f"{path / TENSORS}: holds no LoRA weights of layers")
    for match, shape in parts.items():
        got = shape[0 if match[3] == "A" else -1] if shape else 0
        if got != found:
            raise AdapterError(
                f"{path / TENSORS}: {match[0]} has rank {got}, and {CONFIG} says {found}: export it again"
            )
    for base in bases:
        _fits(parts, base, path, found)
    return found


def _within(path: Path, folders: Sequence[str]) -> Path:
    try:
        real = path.resolve(strict=True)
    except OSError as error:
        raise AdapterError(f"{path}: {error.strerror}: put the adapter's folder there") from error
    if folders and not any(real.is_relative_to(Path(folder).resolve()) for folder in folders):
        raise AdapterError(f"{path} leads to {real}, outside the allowed folders: copy it there")
    return real


def _config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_CONFIG:
            raise AdapterError(f"{path}: larger than any adapter's configuration")
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise AdapterError(
            f"{path}: {error.strerror}: an adapter in PEFT's form has one"
        ) from error
    except ValueError as error:
        raise AdapterError(f"{path}: is no JSON: {error}") from error
    if not isinstance(found, dict) or str(found.get("peft_type", "")).upper() != "LORA":
        raise AdapterError(f"{path}: peft_type is not LORA: only LoRA adapters are served")
    for name in ("use_dora", "modules_to_save"):
        if found.get(name):
            raise AdapterError(f"{path}: {name} is set, which the engine does not serve")
    return found


def _rank(config: Mapping[str, Any], path: Path) -> int:
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{path / CONFIG}: r = {rank!r} is no rank")
    return rank


def _tensors(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:

            def read(_: str, at: int, count: int) -> bytes:
                file.seek(at)
                return file.read(count)

            tensors = examine.header(path.name, size, read, str(path.parent))
    except OSError as error:
        raise AdapterError(
            f"{path}: {error.strerror}: adapters are taken as safetensors only"
        ) from error
    except weights.WeightsError as error:
        raise AdapterError(str(error)) from error
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _fits(
    parts: Mapping["re.Match[str]", tuple[int, ...]],
    base: fleet.ReplicaSpec,
    path: Path,
    rank: int,
) -> None:
    """Raise `AdapterError` if an adapter was made for another base; a base elsewhere can't be looked at."""
    most = base.engine_args.get("max-lora-rank")
    if isinstance(most, int) and rank > most:
        raise AdapterError(
            f"{path}: rank {rank}, and {base.model} {base.version} takes max-lora-rank {most}: raise that"
        )
    try:
        config = json.loads((Path(base.weights) / "config.json").read_text("utf-8"))
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        kv = int(config.get("num_key_value_heads") or heads)
        sizes = {
            "hidden": hidden,
            "inner": int(config["intermediate_size"]),
            "heads": heads * head,
            "kv": kv * head,
        }
        layers = int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    told = f"{path}: was made for another base than {base.model} {base.version}"
    for match, shape in parts.items():
        layer, module, side = int(match[1]), match[2], match[3]
        if layer >= layers:
            raise AdapterError(f"{told}: it has a layer {layer}, that has {layers}")
        kind = (_READS if side == "A" else _WRITES).get(module)
        wide = shape[-1] if side == "A" else shape[0]
        if kind is not None and wide != sizes[kind]:
            raise AdapterError(
                f"{told}: {module} of layer {layer} is {wide} wide there, not {sizes[kind]}"
            )
