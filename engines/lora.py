"""Judges a LoRA adapter before it is registered: its files are whole, its rank is said, its base is ours.

Reads the configuration and the safetensors header alone; nothing of it is ever run.
"""

import dataclasses
import functools
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from engines.weights import examine, sources, task
from scheduler.contracts import fleet, weights

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
DEFAULT_RANK = 16  # vLLM's max-lora-rank where nothing is said
_MOST_CONFIG = 1_000_000  # bytes
_PLAIN = task.Options()
_PART = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(\w+)\.lora_(A|B)\.(?:\w+\.)?weight$")
_MODULE = re.compile(r"(?:^|\.)layers\.\d+\.(?:.*\.)?(\w+)\.weight$")
# What a projection reads and writes, by the base's own config.json; others are judged by their rank alone.
_READS = {"q_proj": "hidden", "k_proj": "hidden", "v_proj": "hidden", "gate_proj": "hidden",
          "up_proj": "hidden", "down_proj": "inner", "o_proj": "heads"}  # fmt: skip
_WRITES = {"q_proj": "heads", "k_proj": "kv", "v_proj": "kv", "gate_proj": "inner",
           "up_proj": "inner", "down_proj": "hidden", "o_proj": "hidden"}  # fmt: skip


class AdapterError(ValueError):
    """The adapter can't be used; the message is one line: what, where, what to do."""


def judge(
    path: Path,
    rank: int,
    bases: Iterable[fleet.ReplicaSpec],
    folders: Sequence[str] = (),
    how: task.Options = _PLAIN,
) -> int:
    """Return an adapter's rank once it is seen to be whole, of that rank, and of the bases' shapes.

    Args:
        path: its folder.
        rank: said at registration; 0: whatever the files say.
        bases: the versions that it shall run on.
        folders: that it must lie in, links followed; none: anywhere.
        how: how the places of bases that are staged are reached.

    Raises:
        AdapterError: anything is wrong with it.
        sources.SourceDown: the place of a base does not answer.
    """
    real = _within(path, folders)
    return _judge(str(path), _config(real / CONFIG), _tensors(real / TENSORS), rank, bases, how)


def judge_place(
    source: sources.Source,
    where: str,
    rank: int,
    bases: Iterable[fleet.ReplicaSpec],
    how: task.Options = _PLAIN,
) -> int:
    """Return the rank of an adapter that lies where it will be staged from, seen by its headers alone.

    Raises:
        AdapterError: anything is wrong with it.
        sources.SourceDown: its place, or that of a base, does not answer.
    """
    try:
        sizes = {one.name: one.size for one in source.files()}
        examine.adapter(sizes, source.read, where)
        if TENSORS not in sizes:
            raise AdapterError(
                f"{where}/{TENSORS}: missing: adapters are taken as safetensors only"
            )
        said = json.loads(bytes(source.read(CONFIG, 0, sizes[CONFIG])))
        tensors = examine.header(TENSORS, sizes[TENSORS], source.read, where)
    except weights.WeightsError as error:
        raise AdapterError(str(error)) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return _judge(where, _served(said, f"{where}/{CONFIG}"), shapes, rank, bases, how)


def _judge(
    where: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    rank: int,
    bases: Iterable[fleet.ReplicaSpec],
    how: task.Options,
) -> int:
    """Return the rank that an adapter's parts agree on; see `judge`."""
    found = _rank(config, where)
    if rank and rank != found:
        raise AdapterError(f"rank {rank} is said, and {where}/{CONFIG} has r = {found}: say that")
    parts = {match: shape for name, shape in tensors.items() if (match := _PART.search(name))}
    if not parts:
        raise AdapterError(f"{where}/{TENSORS}: holds no LoRA weights of layers")
    for match, shape in parts.items():
        got = shape[0 if match[3] == "A" else -1] if shape else 0
        if got != found:
            raise AdapterError(
                f"{where}/{TENSORS}: {match[0]} has rank {got}, and {CONFIG} says {found}: export it again"
            )
    for base in bases:
        _fits(parts, base, where, found, how)
    return found


def _within(path: Path, folders: Sequence[str]) -> Path:
    try:
        real = path.resolve(strict=True)
    except OSError as error:
        raise AdapterError(f"{path}: {error.strerror}: put the adapter's folder there") from error
    if folders and not any(real.is_relative_to(Path(folder).resolve()) for folder in folders):
        raise AdapterError(f"{path} leads to {real}, outside the allowed folders: copy it there")
    return real


def _open(path: Path) -> BinaryIO:
    """Open one of an adapter's files; what is none, such as a pipe, might never end."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise AdapterError(f"{path}: is no file: put the adapter's own there")


def _config(path: Path) -> Mapping[str, Any]:
    try:
        with _open(path) as file:
            text = file.read(_MOST_CONFIG + 1)
        if len(text) > _MOST_CONFIG:
            raise AdapterError(f"{path}: larger than any adapter's configuration")
        found = json.loads(text)
    except AdapterError:
        raise
    except OSError as error:
        raise AdapterError(
            f"{path}: {error.strerror}: an adapter in PEFT's form has one"
        ) from error
    except ValueError as error:
        raise AdapterError(f"{path}: is no JSON: {error}") from error
    return _served(found, str(path))


def _served(found: Any, path: str) -> Mapping[str, Any]:
    """Return an adapter's configuration if it is one that the engine serves."""
    if not isinstance(found, dict) or str(found.get("peft_type", "")).upper() != "LORA":
        raise AdapterError(f"{path}: peft_type is not LORA: only LoRA adapters are served")
    for name in ("use_dora", "modules_to_save"):
        if found.get(name):
            raise AdapterError(f"{path}: {name} is set, which the engine does not serve")
    return found


def _rank(config: Mapping[str, Any], where: str) -> int:
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{where}/{CONFIG}: r = {rank!r} is no rank")
    return rank


def _tensors(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Base:
    """What an adapter must fit: widths by what `_READS` and `_WRITES` call them, layers, and their parts."""

    sizes: Mapping[str, int]
    layers: int
    modules: frozenset[str]


def _base(base: fleet.ReplicaSpec, how: task.Options) -> _Base | None:
    """Look at a base where it lies; None where that says nothing: its node will look again.

    Raises:
        sources.SourceDown: the place that it is staged from does not answer.
    """
    staged = weights.staged(base.weights)
    try:
        source = _source(base.weights, how)
        files = source.files()
        size = next(one.size for one in files if one.name == "config.json")
        config = json.loads(bytes(source.read("config.json", 0, size)))
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
    except sources.SourceDown:
        if staged:
            raise
        return None
    except (ValueError, KeyError, TypeError, StopIteration):
        return None
    shards = tuple(one for one in files if one.name.endswith(".safetensors"))
    return _Base(sizes, layers, _modules(base.weights, shards, how))


def _source(where: str, how: task.Options) -> sources.Source:
    if weights.staged(where):
        return sources.of(weights.parse(where), how)
    return sources.Folder(Path(where))


@functools.lru_cache(maxsize=64)
def _modules(where: str, shards: tuple[sources.Found, ...], how: task.Options) -> frozenset[str]:
    """Return the names of what a base's layers are made of; none where its weights can't be looked at.

    vLLM passes over what it does not find: such an adapter's requests would be answered by the base. Read
    once while the files stay as they are.
    """
    source = _source(where, how)
    try:
        return frozenset(
            match[1]
            for one in shards
            for name in examine.header(one.name, one.size, source.read, where)
            if (match := _MODULE.search(name))
        )
    except weights.WeightsError:
        return frozenset()


def _fits(
    parts: Mapping["re.Match[str]", tuple[int, ...]],
    base: fleet.ReplicaSpec,
    path: str,
    rank: int,
    how: task.Options,
) -> None:
    """Raise `AdapterError` if an adapter was made for another base."""
    said = {name.replace("_", "-"): value for name, value in base.engine_args.items()}
    most = said.get("max-lora-rank", DEFAULT_RANK)
    if isinstance(most, int) and rank > most:
        raise AdapterError(
            f"{path}: rank {rank}, and {base.model} {base.version} takes max-lora-rank {most}: "
            "raise that in its engine_args"
        )
    found = _base(base, how)
    if found is None:
        return
    told = f"{path}: was made for another base than {base.model} {base.version}"
    for match, shape in parts.items():
        layer, module, side = int(match[1]), match[2], match[3]
        if layer >= found.layers:
            raise AdapterError(f"{told}: it has a layer {layer}, that has {found.layers}")
        if found.modules and module not in found.modules:
            raise AdapterError(f"{told}: it changes {module}, which that does not have")
        kind = (_READS if side == "A" else _WRITES).get(module)
        wide = shape[-1] if side == "A" else shape[0]
        if kind is not None and wide != found.sizes[kind]:
            raise AdapterError(
                f"{told}: {module} of layer {layer} is {wide} wide there, not {found.sizes[kind]}"
            )
