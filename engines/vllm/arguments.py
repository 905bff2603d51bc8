"""A replica's spec as vLLM's command line, and which options Forebay keeps for itself.

Pure: vLLM's own parser judges the rest (`configure.parse`). An option is refused if it opens a port or
lets a request or a file name run code, if it says again what the spec says, or if it takes away what
Forebay measures by.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from engines.vllm import tuned
from scheduler.contracts import fleet

_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[A-Za-z0-9_.+-]+)?")

_FROM_SPEC = {
    "model": "weights",
    "model-tag": "weights",
    "served-model-name": "model",
    "max-num-seqs": "seats",
    "max-model-len": "max_context",
    "enable-lora": "adapters",
    "lora-modules": "adapters",
    "max-loras": "adapter_slots",
    "max-cpu-loras": "adapter_host",
}
_OPENS_A_PORT = frozenset(
    {
        "host", "port", "uds", "root-path", "api-key", "grpc", "grpc-port", "headless",
        "api-server-count", "asc", "allow-credentials", "allowed-origins", "allowed-methods",
        "allowed-headers", "kv-transfer-config", "ec-transfer-config", "kv-events-config",
        "weight-transfer-config", "tool-server", "enable-scale-out", "tokens-only",
        "enable-fault-tolerance", "distributed-executor-backend", "nnodes", "node-rank",
        "master-addr", "master-port", "profiler-config", "otlp-traces-endpoint",
    }
)  # fmt: skip
_OPENS_A_PORT_PREFIXES = ("ssl-", "enable-ssl", "data-parallel-", "dp-")
_RUNS_CODE = frozenset(
    {
        "trust-remote-code", "trust-request-chat-template", "trust-request-mm-kwargs", "middleware",
        "tool-parser-plugin", "reasoning-parser-plugin", "scheduler-cls", "worker-cls",
        "worker-extension-cls", "logits-processors", "io-processor-plugin", "model-class-overrides",
        "allowed-local-media-path", "hf-token", "config", "additional-config",
        "logging-config", "log-config-file", "ec-manager-config", "default-mm-loras",
        "enable-prompt-embeds", "enable-mm-embeds",
    }
)  # fmt: skip
# What an option's JSON may not say either: the same by the name of a field, and classes by their path.
_RUNS_CODE_INSIDE = frozenset(name for name in _RUNS_CODE if "-" in name)
_BY_PATH = frozenset({"backend"})
# Pickles run code when they are loaded, and the others load what no look at the weights has seen.
_FORMATS = frozenset(
    {
        "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "sharded_state",
        "runai_streamer", "runai_streamer_sharded", "bitsandbytes", "dummy",
    }
)  # fmt: skip
_NEEDED = frozenset(
    {
        "disable-log-stats", "enable-prompt-tokens-details", "scheduling-policy",
        "skip-tokenizer-init", "max-num-queued-reqs",
        "disable-frontend-multiprocessing",
    }
)  # fmt: skip


class ArgumentError(ValueError):
    """The engine's arguments can't be used; the message is one line for the model's owner."""


def command_line(spec: fleet.ReplicaSpec) -> list[str]:
    """Return vLLM's command line for ``spec``.

    Raises:
        ArgumentError: an argument is refused, or is no name or value that a command line can hold.
    """
    if not spec.weights:
        raise ArgumentError(f"model {spec.model}: weights must name the model's folder")
    line = [
        f"--model={spec.weights}",
        f"--served-model-name={spec.model}",
        f"--max-num-seqs={spec.seats}",
        f"--max-model-len={spec.max_context}",
        "--scheduling-policy=priority",
        "--enable-prompt-tokens-details",
        "--disable-fastapi-docs",
    ]
    said: dict[str, Any] = {}
    for raw, value in spec.engine_args.items():
        name = raw.removeprefix("--").replace("_", "-")
        _check(spec.model, raw, name)
        _check_value(spec.model, raw, name, value)
        said[name] = value
    try:
        typed = tuned.options(spec, said)
    except ValueError as error:
        raise ArgumentError(f"model {spec.model}: {error}") from error
    for name, value in (typed | said).items():
        line += _option(spec.model, name, value)
    return line + list(_adapters(spec))


def _check(model: str, raw: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"model {model}: engine_args {raw!r} is no long option's name")
    base = name.partition(".")[0]
    base = base.removeprefix("no-")
    if base in _FROM_SPEC:
        raise ArgumentError(
            f"model {model}: engine_args {raw} is taken from `{_FROM_SPEC[base]}`, set that instead"
        )
    if base in _OPENS_A_PORT or base.startswith(_OPENS_A_PORT_PREFIXES):
        raise ArgumentError(
            f"model {model}: engine_args {raw} is refused: a replica has one port, which Forebay opens"
        )
    if base in _RUNS_CODE:
        raise ArgumentError(
            f"model {model}: engine_args {raw} is refused: it could run code or read files for a request"
        )
    if base in _NEEDED:
        raise ArgumentError(f"model {model}: engine_args {raw} is set by Forebay, remove it")


def _check_value(model: str, raw: str, name: str, value: Any) -> None:
    if name == "load-format" and str(value).lower() not in _FORMATS:
        raise ArgumentError(
            f"model {model}: engine_args {raw} {value} is refused: weights are loaded as safetensors; "
            "convert them and leave it out"
        )
    for field, item in _inside(name, value):
        # A dot parts the field of a path from the option itself, and names a class where a word would do.
        if field in _RUNS_CODE_INSIDE or (field in _BY_PATH and "." in str(item)):
            raise ArgumentError(
                f"model {model}: engine_args {raw}: {field} is refused: it could run code or read files "
                "for a request"
            )


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an option's JSON and their values, at any depth and however it is written."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    for part in name.split(".")[1:]:
        yield part.rstrip("+").replace("_", "-"), value
    items: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, Mapping):
        items = ((f".{field}", item) for field, item in value.items())
    elif isinstance(value, list | tuple):
        items = (("", item) for item in value)
    for field, item in items:
        yield from _inside(field, item)


def _option(model: str, name: str, value: Any) -> Iterator[str]:
    if value is True:
        yield f"--{name}"
    elif value is False:
        yield f"--no-{name}"
    elif isinstance(value, dict):
        yield f"--{name}={json.dumps(value)}"
    elif isinstance(value, list | tuple):
        # One `--name a b c`; a value that begins with a dash would be read as an option.
        words = [str(item) for item in value]
        if not words or any(word.startswith("-") for word in words):
            raise ArgumentError(
                f"model {model}: engine_args {name}: an empty list, or a value with a dash"
            )
        yield f"--{name}"
        yield from words
    elif isinstance(value, str | int | float):
        yield f"--{name}={value}"
    else:
        raise ArgumentError(
            f"model {model}: engine_args {name}: {type(value).__name__} is no option's value"
        )


def adapter_name(model: str, adapter: str) -> str:
    """Return the name under which a replica serves an adapter, beside the adapter's own."""
    return f"{model}:{adapter}"


def _adapters(spec: fleet.ReplicaSpec) -> Iterator[str]:
    if not spec.adapters and not spec.adapter_slots:
        return
    yield "--enable-lora"
    # One more than there are: on CPUs, with all slots filled, requests for the base model that share a
    # batch with adapters silently get the last slot's weights (seen with vLLM 0.32.0); see `loras.room`.
    slots = len(spec.adapters) + spec.adapter_slots + 1
    yield f"--max-loras={slots}"
    yield f"--max-cpu-loras={max(slots, spec.adapter_host + len(spec.adapters) + 1)}"
    if not spec.adapters:
        return
    yield "--lora-modules"
    for name, path in spec.adapters.items():
        yield json.dumps({"name": adapter_name(spec.model, name), "path": path})
