"""Judges a set of weights before it is fetched: nothing missing, nothing cut off, shapes as config.json says.

Reads a few kilobytes of each file: configuration, index, safetensors headers. Pure apart from the reader.
"""

import dataclasses
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engines.weights import sources
from scheduler.contracts import weights

Read = Callable[[str, int, int], bytes | memoryview]
_BLOCK = 16 * 1024 * 1024
MOST_HEADER = 100_000_000  # bytes; the format's own limit
_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
# Pickles run code when they are loaded; the others are copies in forms that no engine here reads.
_UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib")
_LEFT_OUT = (
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".gguf",
    ".md",
    ".png",
    ".jpg",
    ".pdf",
    ".py",
    ".pyc",
    ".sh",
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "vocab.txt",
    "spiece.model",
)
# Whose projections are shaped as below; others are judged by their embedding and layers alone.
_PLAIN = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaModel"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a set of weights is.

    Attributes:
        names: the files to take.
        size: their bytes.
        parameters: numbers in the tensors.
        dtypes: of the tensors, as safetensors names them.
        fp8: what says that they are stored in 8-bit floats, "" if nothing does.
    """

    names: tuple[str, ...]
    size: int
    parameters: int
    dtypes: tuple[str, ...]
    fp8: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]


def chosen(sizes: Mapping[str, int], where: str, *, unsafe: bool) -> tuple[str, ...]:
    """Return which files are taken: safetensors and what stands beside them in plain text.

    Args:
        sizes: file name to bytes.
        where: the place, for messages.
        unsafe: whether the site lets pickled weights in.

    Raises:
        weights.WeightsError: there is nothing to load, or only what could run code.
    """
    safe = [name for name in sizes if name.endswith(".safetensors")]
    pickled = [name for name in sizes if name.endswith(_UNSAFE)]
    if not safe and pickled and not unsafe:
        raise weights.WeightsError(
            f"{where}: {sorted(pickled)[0]} is a pickle, which can run code when it is loaded: "
            "convert the weights "
            "to safetensors, or let the site allow them ([engines] weights_unsafe)"
        )
    if not safe and not pickled:
        raise weights.WeightsError(
            f"{where}: no *.safetensors there; check the place, or upload the weights"
        )
    out = _LEFT_OUT if unsafe and not safe else (*_LEFT_OUT, *_UNSAFE)
    taken = tuple(
        sorted(
            name
            for name in sizes
            if not name.endswith(out) and name != weights.MANIFEST and not _hidden(name)
        )
    )
    for name in taken:
        weights.check_name(name, where)
    return taken


def _hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in {".", ".."} for part in name.split("/"))


def examine(sizes: Mapping[str, int], read: Read, where: str, *, unsafe: bool = False) -> Summary:
    """Judge a set of weights by its headers.

    Args:
        sizes: file name to bytes, of everything at the place.
        read: returns bytes of a file: name, start, length.
        where: the place, for messages.
        unsafe: whether the site lets pickled weights in.

    Raises:
        weights.WeightsError: something is missing, cut off, or of another shape than config.json says.
    """
    names = chosen(sizes, where, unsafe=unsafe)
    config = _json("config.json", sizes, read, where)
    if config is None:
        raise weights.WeightsError(
            f"{where}: config.json is missing: upload the model's whole folder"
        )
    if not any(name in sizes for name in _TOKENIZERS):
        raise weights.WeightsError(
            f"{where}: no tokenizer ({_TOKENIZERS[0]} or the like): upload it beside the weights"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    _nothing_missing(shards, _json("model.safetensors.index.json", sizes, read, where), where)
    tensors: dict[str, _Tensor] = {}
    for name in shards:
        tensors |= header(name, sizes[name], read, where)
    if shards:
        shapes(config, tensors, where)
    return Summary(
        names=names,
        size=sum(sizes[name] for name in names),
        parameters=sum(math.prod(one.shape) for one in tensors.values()),
        dtypes=tuple(sorted({one.dtype for one in tensors.values()})),
        fp8=_fp8(config, tensors),
    )


def _fp8(config: Mapping[str, Any], tensors: Mapping[str, _Tensor]) -> str:
    """Return what says that weights are 8-bit floats; scales of other formats do not count."""
    said = config.get("quantization_config")
    method = str(said.get("quant_method", "")) if isinstance(said, Mapping) else ""
    if "fp8" in method.lower():
        return f"quant_method {method} in config.json"
    found = (name for name, one in tensors.items() if one.dtype.startswith("F8_E"))
    name = next((name for name in found if name.endswith(".weight")), "")
    return f"{name} is {tensors[name].dtype}" if name else ""


def adapter(sizes: Mapping[str, int], read: Read, where: str, *, unsafe: bool = False) -> Summary:
    """Judge a LoRA adapter in PEFT's form by its headers; pickles are never taken.

    Raises:
        weights.WeightsError: something is missing or cut off.
    """
    del unsafe
    names = chosen(sizes, where, unsafe=False)
    if _json("adapter_config.json", sizes, read, where) is None:
        raise weights.WeightsError(
            f"{where}: adapter_config.json is missing: upload the adapter's whole folder"
        )
    tensors: dict[str, _Tensor] = {}
    for name in names:
        if name.endswith(".safetensors"):
            tensors |= header(name, sizes[name], read, where)
    return Summary(
        names=names,
        size=sum(sizes[name] for name in names),
        parameters=sum(math.prod(one.shape) for one in tensors.values()),
        dtypes=tuple(sorted({one.dtype for one in tensors.values()})),
    )


def _json(name: str, sizes: Mapping[str, int], read: Read, where: str) -> dict[str, Any] | None:
    if name not in sizes:
        return None
    try:
        value = json.loads(bytes(read(name, 0, sizes[name])))
    except ValueError as error:
        raise weights.WeightsError(
            f"{where}/{name}: not JSON ({error}): upload it again"
        ) from error
    if not isinstance(value, dict):
        raise weights.WeightsError(f"{where}/{name}: no JSON object: upload it again")
    return value


def _nothing_missing(shards: Sequence[str], index: Mapping[str, Any] | None, where: str) -> None:
    """Compare the shards with the index, or with their own numbers (``-00001-of-00003``)."""
    wanted = set(dict(index.get("weight_map", {})).values()) if index is not None else set()
    for name in shards:
        numbered = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", name)
        if numbered:
            head, digits, middle, of, tail = numbered.groups()
            if len(of) > 6:
                raise weights.WeightsError(f"{where}: {name}: no such number of shards")
            wanted |= {
                f"{head}{n:0{len(digits)}d}{middle}{of}{tail}" for n in range(1, int(of) + 1)
            }
    missing = sorted(wanted - set(shards))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise weights.WeightsError(
            f"{where}: {missing[0]}{more} missing, which the index names: upload it"
        )


def header(name: str, size: int, read: Read, where: str) -> dict[str, _Tensor]:
    """Return the tensors that a safetensors file declares.

    Raises:
        weights.WeightsError: the file is cut off or no safetensors.
    """
    what = f"{where}/{name}"
    cut = weights.WeightsError(f"{what}: cut off ({size} bytes): upload it again")
    if size < 8:
        raise cut
    (length,) = struct.unpack("<Q", bytes(read(name, 0, 8)))
    if length > MOST_HEADER:
        raise weights.WeightsError(
            f"{what}: no safetensors (its header would have {length} bytes): upload it again"
        )
    if 8 + length > size:
        raise cut
    try:
        said = json.loads(bytes(read(name, 8, length)))
        said.pop("__metadata__", None)
        tensors = {
            key: _Tensor(str(one["dtype"]), tuple(one["shape"])) for key, one in said.items()
        }
        spans = sorted(tuple(one["data_offsets"]) for one in said.values())
        empty = all(isinstance(edge, int) for span in spans for edge in span)
        if not empty:
            raise TypeError("offsets are no numbers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise weights.WeightsError(
            f"{what}: its header is damaged ({error}): upload it again"
        ) from error
    at = 0
    for first, last in spans:
        if first != at or last < first:
            raise weights.WeightsError(
                f"{what}: its tensors overlap or leave a gap at byte {at}: upload it again"
            )
        at = last
    if 8 + length + at != size:
        raise weights.WeightsError(
            f"{what}: {size} bytes, but its header declares {8 + length + at}: cut off or "
            "damaged, upload it again"
        )
    for key, one in tensors.items():
        first, last = said[key]["data_offsets"]
        width = _BYTES.get(one.dtype)
        if width is not None and math.prod(one.shape) * width != last - first:
            raise weights.WeightsError(
                f"{what}: {key} is {list(one.shape)} of {one.dtype} and has {last - first} "
                "bytes: upload it again"
            )
    return tensors


def shapes(config: Mapping[str, Any], tensors: Mapping[str, _Tensor], where: str) -> None:
    """Compare tensors with config.json, as far as it says what they are.

    Raises:
        weights.WeightsError: one has another shape, or a layer is missing.
    """
    text = config.get("text_config")
    about = dict(text) if isinstance(text, Mapping) else dict(config)
    layers = about.get("num_hidden_layers")
    named = {
        int(found[1])
        for key in tensors
        if (found := re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", key))
    }
    if isinstance(layers, int) and named and (missing := sorted(set(range(layers)) - named)):
        raise weights.WeightsError(
            f"{where}: config.json says {layers} layers and layer {missing[0]} has no weights: "
            "wrong config.json, or "
            "a shard is missing"
        )
    expected = _expected(config, about)
    for key, one in tensors.items():
        suffix = re.sub(
            r"^.*?((?:embed_tokens|self_attn\.\w_proj|mlp\.\w+_proj)\.weight)$", r"\1", key
        )
        want = expected.get(suffix)
        if want is not None and one.shape != want:
            raise weights.WeightsError(
                f"{where}: {key} is {list(one.shape)}, and config.json makes it {list(want)}: "
                "these are not one "
                "model's files; upload config.json and weights of the same version"
            )


def _expected(config: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return suffix of a tensor's name to its shape, for what config.json determines."""
    hidden, vocabulary = about.get("hidden_size"), about.get("vocab_size")
    found: dict[str, tuple[int, int]] = {}
    if not isinstance(hidden, int):
        return found
    architectures = config.get("architectures") or [""]
    if architectures[0] not in _PLAIN or config.get("quantization_config"):
        return found
    if isinstance(vocabulary, int):
        found["embed_tokens.weight"] = (vocabulary, hidden)
    heads = about.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        size = about.get("head_dim") or hidden // heads
        shared = (about.get("num_key_value_heads") or heads) * size
        found |= {
            "self_attn.q_proj.weight": (heads * size, hidden),
            "self_attn.k_proj.weight": (shared, hidden),
            "self_attn.v_proj.weight": (shared, hidden),
            "self_attn.o_proj.weight": (hidden, heads * size),
        }
    inner = about.get("intermediate_size")
    if isinstance(inner, int):
        found |= {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
    return found


def manifest(source: sources.Source, where: str, *, unsafe: bool = False) -> weights.Manifest:
    """Read a whole set of weights and return its manifest.

    Raises:
        sources.SourceDown: the place does not answer.
        weights.WeightsError: the weights can't be used as they are.
    """
    found = {one.name: one.size for one in source.files()}
    names = examine(found, source.read, where, unsafe=unsafe).names
    return weights.Manifest(
        tuple(weights.File(name, found[name], _sha256(source, name, found[name])) for name in names)
    )


def _sha256(source: sources.Source, name: str, size: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, size, _BLOCK):
        digest.update(source.read(name, start, min(_BLOCK, size - start)))
    return digest.hexdigest()
