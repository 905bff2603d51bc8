"""A replica's spec as vLLM's command line, and which options Forebay keeps for itself.

Pure: vLLM's own parser judges the rest (`adapter.parse`). An option is refused if it opens a port or
lets a request or a file name run code, if it says again what the spec says, or if it takes away what
Forebay measures by.
"""

import json
import re
from collections.abc import Iterator
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
    "max-loras": "adapters",
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
    if not spec.adapters:
        return
    yield "--enable-lora"
    # One more than there are: with all slots filled, requests for the base model that share a batch
    # with adapters silently get the last slot's weights (seen with vLLM 0.32.0).
    yield f"--max-loras={len(spec.adapters) + 1}"
    yield "--lora-modules"
    for name, path in spec.adapters.items():
        yield json.dumps({"name": adapter_name(spec.model, name), "path": path})
