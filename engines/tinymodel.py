"""Makes a tiny random Llama on disk, so that demo and tests serve a real model without downloading one.

``python -P -m engines.tinymodel DIR [--lora NAME …] [--labels A,B] [--seed N]`` writes a folder in the form
that vLLM and transformers load: 1.7 million parameters in float32, a byte-level BPE tokenizer trained on the
text below, a chat template, a context of 2048 tokens. It talks nonsense, the same nonsense each time: equal
arguments give equal bytes on every machine, since only integers are drawn and scaled. Standard library
alone, because neither Forebay's environment nor a login node has torch.
"""

import argparse
import array
import collections
import dataclasses
import functools
import itertools
import json
import math
import random
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONTEXT = 2048
VOCABULARY = 960
_HIDDEN = 192
_INTERMEDIATE = 576
_LAYERS = 3
_HEADS = 6
_KV_HEADS = 2
_HEAD_DIM = 32  # the least that vLLM's attention kernels for CPUs take
_LORA_RANK = 4

BOS, EOS = "<|begin|>", "<|end|>"
_SPECIALS = (BOS, EOS, "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|sep|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|sep|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TEXT = """
A forebay is the pool of water above a turbine. It is kept full so that the wheel can start at once when
somebody needs the power, and what is not needed now runs over the weir and does other work.
The river brings more water in spring than in autumn. The miller looks at the level each morning, writes
it down, and opens or closes the gates by a hand's breadth. He never closes them all.
When many people want light at the same time the gates open wide. The grain waits in its sacks; nobody is
hungry for flour at six in the evening. Later, when the town sleeps, the stones turn again.
Every night the keeper counts what each house has used and writes one line for it. No line is written
twice and none is lost, even when the lamp goes out while he is writing.
If a gate breaks, the water takes the other channel before anybody in the town has noticed. The broken
gate is marked with a red cloth, and nobody opens it until it has been repaired.
The children ask how a turbine works. Water falls, the falling turns the blades, the blades turn the
shaft, and the shaft turns a magnet inside a coil of copper wire. That is all there is to it.
Who pays for the repair of the dam? Those who use the water, each by the share that was measured. Those
who used nothing pay nothing, and those who waited for the night pay less.
One day there was a flood. The keeper opened every gate, took the boards out of the weir, and went up the
hill with his books under his arm. In the morning the mill stood as before, and the books were dry.
Please tell me a short story about a river. Write a list of three things that float. What is the capital
of the country where the river ends? Explain why the sky is blue in two sentences. Translate this letter
into plain words. Summarise the report for the council. How many buckets fill a tank of forty litres?
Yes, of course. Here is the answer that you asked for. First, wood floats. Second, ice floats. Third, an
empty bottle floats if it is closed. I do not know the rest, but I can look it up for you.
Model, token, request, answer, queue, batch, replica, lease, cluster, node, memory, cache, block, step.
The first token comes after the prompt has been read; the others follow one by one until the end.
0 1 2 3 4 5 6 7 8 9 10 11 12 20 25 30 40 50 60 64 75 80 90 100 128 200 256 500 512 1000 1024 2048 4096
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday; January, February, March, April, May, June,
July, August, September, October, November, December. North, south, east, west; left, right, up, down.
def answer(question: str) -> str: return question.strip().lower() if question else "nothing was asked"
{"role": "user", "content": "hello"} {"name": "weather", "arguments": {"city": "Lausanne", "days": 3}}
The water, the wheel, the stone, the flour, the bread: each morning the same way, each evening back again.
"""


def _byte_letters() -> dict[int, str]:
    """Return the printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    spare = (chr(256 + n) for n in range(256))
    return {byte: letters.get(byte) or next(spare) for byte in range(256)}


@functools.cache
def _merges() -> tuple[tuple[str, str], ...]:
    """Return the pairs of the one tokenizer that there is: learning them takes most of a model's making."""
    return tuple(_train(_TEXT, VOCABULARY - 256 - len(_SPECIALS)))


def _train(text: str, tokens: int) -> list[tuple[str, str]]:
    """Learn byte pairs that make ``tokens`` new tokens, most frequent first; ties go by the alphabet."""
    letters = _byte_letters()
    counts = collections.Counter(re.findall(r" ?\w+| ?[^\s\w]+|\s+", text))
    words = [([letters[byte] for byte in word.encode()], count) for word, count in counts.items()]
    learned: list[tuple[str, str]] = []
    made: set[str] = set()
    while len(made) < tokens:
        pairs: collections.Counter[tuple[str, str]] = collections.Counter()
        for symbols, count in words:
            for pair in itertools.pairwise(symbols):
                pairs[pair] += count
        if not pairs:
            raise ValueError(f"the text gives only {len(made)} of {tokens} tokens: make it longer")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        made.add(best[0] + best[1])
        for symbols, _ in words:
            _merge(symbols, best)
    return learned


def _merge(symbols: list[str], pair: tuple[str, str]) -> None:
    """Join every occurrence of ``pair`` in place."""
    at = 0
    while at < len(symbols) - 1:
        if (symbols[at], symbols[at + 1]) == pair:
            symbols[at : at + 2] = [pair[0] + pair[1]]
        at += 1


def tokenizer() -> dict[str, Any]:
    """Return ``tokenizer.json``: every byte is a token, so any text comes back as it went in."""
    merges = _merges()
    vocabulary = {letter: n for n, letter in enumerate(_byte_letters().values())}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    first = VOCABULARY - len(_SPECIALS)
    added = [
        {
            "id": first + n,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, name in enumerate(_SPECIALS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def _id(special: str) -> int:
    return VOCABULARY - len(_SPECIALS) + _SPECIALS.index(special)


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _id(BOS),
        "eos_token_id": _id(EOS),
        "pad_token_id": _id("<|pad|>"),
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": False,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """Shape and little-endian float32 bytes."""

    shape: tuple[int, ...]
    data: bytes


class _Source:
    """Draws tensors from one seeded stream of integers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - weights, not secrets

    def uniform(self, *shape: int, spread: float) -> _Tensor:
        """Return values spread evenly over ±``spread``."""
        drawn = array.array("h", self._random.randbytes(2 * math.prod(shape)))
        if sys.byteorder == "big":
            drawn.byteswap()
        step = spread / 32768
        return _floats(shape, [step * value for value in drawn])


def _floats(shape: tuple[int, ...], values: Sequence[float]) -> _Tensor:
    stored = array.array("f", values)
    if sys.byteorder == "big":
        stored.byteswap()
    return _Tensor(shape, stored.tobytes())


def _weights(seed: int) -> dict[str, _Tensor]:
    source = _Source(seed)
    # Spread ±√(3/n) gives each output the variance of its inputs (Glorot and Bengio 2010), so that
    # no layer fades and the next token depends on the whole prompt.
    inner, wide = math.sqrt(3 / _HIDDEN), math.sqrt(3 / _INTERMEDIATE)
    one = _floats((_HIDDEN,), [1.0] * _HIDDEN)
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": source.uniform(VOCABULARY, _HIDDEN, spread=1.0),
        "model.norm.weight": one,
        # Twice the usual spread: a clear winner among the next tokens, so greedy answers are stable.
        "lm_head.weight": source.uniform(VOCABULARY, _HIDDEN, spread=2 * inner),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": one,
            f"{at}.post_attention_layernorm.weight": one,
            f"{at}.self_attn.q_proj.weight": source.uniform(queries, _HIDDEN, spread=2 * inner),
            f"{at}.self_attn.k_proj.weight": source.uniform(keys, _HIDDEN, spread=2 * inner),
            f"{at}.self_attn.v_proj.weight": source.uniform(keys, _HIDDEN, spread=inner),
            f"{at}.self_attn.o_proj.weight": source.uniform(_HIDDEN, queries, spread=inner),
            f"{at}.mlp.gate_proj.weight": source.uniform(_INTERMEDIATE, _HIDDEN, spread=inner),
            f"{at}.mlp.up_proj.weight": source.uniform(_INTERMEDIATE, _HIDDEN, spread=inner),
            f"{at}.mlp.down_proj.weight": source.uniform(_HIDDEN, _INTERMEDIATE, spread=wide),
        }
    return tensors


def _lora(seed: int) -> dict[str, _Tensor]:
    """Return an adapter that is strong enough to change nearly every greedy answer."""
    source = _Source(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for name, rows, columns in (
            ("self_attn.o_proj", _HIDDEN, _HEADS * _HEAD_DIM),
            ("mlp.down_proj", _HIDDEN, _INTERMEDIATE),
        ):
            at = f"base_model.model.model.layers.{layer}.{name}"
            spread = math.sqrt(3 / columns)
            tensors[f"{at}.lora_A.weight"] = source.uniform(_LORA_RANK, columns, spread=spread)
            tensors[f"{at}.lora_B.weight"] = source.uniform(rows, _LORA_RANK, spread=1.0)
    return tensors


def _write_safetensors(path: Path, tensors: Mapping[str, _Tensor]) -> None:
    """Write the safetensors form: header length (u64), JSON header padded to 8 bytes, then the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        span = [at, at + len(tensor.data)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.data)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="ascii")


def make(folder: Path, *, seed: int = 0) -> None:
    """Write the model into ``folder`` (made if needed; files of the same names are replaced)."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "model.safetensors", _weights(seed))
    _write_json(folder / "tokenizer.json", tokenizer())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": "<|pad|>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": _id(BOS), "eos_token_id": _id(EOS), "pad_token_id": _id("<|pad|>")},
    )
    _write_json(folder / "config.json", _config())


def make_classifier(folder: Path, *, labels: Sequence[str] = ("no", "yes"), seed: int = 0) -> None:
    """Write a classifier into ``folder``: the model's body, and a head of its own in the model's place.

    With one label it scores a pair of texts, as rankers do.
    """
    make(folder, seed=seed)
    tensors = {name: one for name, one in _weights(seed).items() if name != "lm_head.weight"}
    head = _Source(seed + 1).uniform(len(labels), _HIDDEN, spread=2 * math.sqrt(3 / _HIDDEN))
    _write_safetensors(folder / "model.safetensors", {**tensors, "score.weight": head})
    names = {str(number): label for number, label in enumerate(labels)}
    (folder / "generation_config.json").unlink()
    _write_json(
        folder / "config.json",
        {
            **_config(),
            "architectures": ["LlamaForSequenceClassification"],
            "id2label": names,
            "label2id": {label: int(number) for number, label in names.items()},
        },
    )


def make_lora(folder: Path, *, seed: int = 1) -> None:
    """Write a LoRA adapter for the model into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "adapter_model.safetensors", _lora(seed))
    _write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "",
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": 2 * _LORA_RANK,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "r": _LORA_RANK,
            "target_modules": ["o_proj", "down_proj"],
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -P -m engines.tinymodel", description="make a tiny random Llama on disk"
    )
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another model")
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="also write a LoRA adapter to FOLDER-NAME; may be repeated",
    )
    parser.add_argument(
        "--labels",
        metavar="A,B",
        help="make a classifier with these labels instead; of one label: a ranker",
    )
    options = parser.parse_args(argv)
    if options.labels:
        labels = options.labels.split(",")
        make_classifier(options.folder, labels=labels, seed=options.seed)
    else:
        make(options.folder, seed=options.seed)
    for number, name in enumerate(options.lora, start=1):
        make_lora(
            options.folder.with_name(f"{options.folder.name}-{name}"), seed=options.seed + number
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
