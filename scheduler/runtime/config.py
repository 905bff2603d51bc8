"""Reads forebay.toml: one table per folder, typed, with the line at fault in every error.

Each table is a frozen dataclass whose fields are made by `scheduler.contracts.settings.setting`. The
environment overrides the file (``FOREBAY_<TABLE>_<KEY>``). Nothing here knows what a setting means.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from scheduler.contracts import fleet, requests, settings
from scheduler.contracts import tuning as tunings
from scheduler.contracts import weights as weight_places
from scheduler.runtime import scaling as bounds
from scheduler.runtime import toml_lines

T = TypeVar("T")
MODELS = "models"
PREFIX = "FOREBAY_"
_LISTED = 20  # more names than these say nothing in one line


class ConfigError(Exception):
    """The configuration can't be used; `faults` has one line for each fault, with its place."""

    def __init__(self, faults: Sequence[str]) -> None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{faults[0]}{more}")
        self.faults = tuple(faults)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings:
    """One `[[models]]` entry: what is served, how, and how much of it is kept warm."""

    name: str = settings.setting(dataclasses.MISSING, "The name that callers write in `model`.")
    version: str = settings.setting(
        "v1", "Version; entries of one name with several versions share its route."
    )
    weight: int = settings.setting(
        100, "Share of the route in percent among versions of this name.", least=0
    )
    engine: fleet.EngineKind = settings.setting(
        fleet.EngineKind.VLLM, "vllm, http (any OpenAI-compatible server) or simulated."
    )
    runner: requests.Runner = settings.setting(
        requests.Runner.GENERATE,
        "What it does: generate (chat, completions, responses), embed (embeddings, rerank) or classify "
        "(classify, rerank).",
    )
    weights: str = settings.setting(
        "",
        "Folder of the weights, or a place to stage them from: file:///folder, s3://bucket/prefix, "
        "hf://owner/name@revision (vllm); base URL (http).",
    )
    weights_digest: str = settings.setting(
        "",
        "Digest of the weights' manifest, which nodes then insist on; empty: what the place has.",
    )
    tuning: Mapping[str, Any] = settings.setting(
        {},
        "Engine settings known by type: chunk_tokens, prefix_caching, kv_offload_gb, speculative, "
        "quantization_approval; see docs/engine-settings.md.",
    )
    engine_args: Mapping[str, Any] = settings.setting(
        {}, "Engine options by long name without dashes; true stands for a bare flag."
    )
    seats: int = settings.setting(8, "Sequences that run at once in a replica.", least=1)
    reserved_seats: int = settings.setting(
        1, "Seats that batch never takes while a replica is shared.", least=0
    )
    max_context: int = settings.setting(2048, "Longest prompt plus output.", unit="tokens", least=1)
    gpus: int = settings.setting(
        1,
        "GPUs of one replica; 0: it runs on CPUs, as what stands before an http server does.",
        least=0,
    )
    replicas: int = settings.setting(
        1, "Replicas kept warm, where `scaling` says nothing.", least=0
    )
    scaling: Mapping[str, Any] = settings.setting(
        {},
        "Bounds of the autoscaler in replicas; without any, `replicas` is fixed. floor: kept warm always; "
        "minimum: never fewer until nobody has asked for idle_to_zero_s; maximum (0: no bound): of all "
        "callers; interactive_floor, standard_maximum and so on: the same three of one tier, which share "
        "replicas, so that floors add up; batch_floor, batch_minimum, batch_maximum: of what is lent to "
        "batch, the floor even when callers would need it. requests_per_s and concurrency: what a replica "
        "takes within its SLOs; park_gb: host memory in 10^9 bytes that it takes parked.",
    )
    role: fleet.Role = settings.setting(
        fleet.Role.SHARED, "What a replica takes in calm: interactive, shared or batch."
    )
    tiers: tuple[requests.Tier, ...] = settings.setting(
        tuple(requests.Tier), "Tiers that this model is offered in."
    )
    adapters: Mapping[str, str] = settings.setting({}, "LoRA adapters: name to folder.")
    adapter_slots: int = settings.setting(
        -1,
        "LoRA adapters that a replica may run in one batch; each takes GPU memory, used or not. "
        "-1: as many as `adapters` has, at most 8.",
        least=-1,
    )
    adapter_host: int = settings.setting(
        0, "LoRA adapters that a replica holds ready in host memory; 0: as many as slots.", least=0
    )
    dedicated: str = settings.setting(
        "",
        "Team whose own floor these replicas are: idle and start-up GPU time is charged to it; "
        "empty: they are everybody's.",
    )

    itl_slo_ms: float = settings.setting(
        25.0,
        "Inter-token latency that interactive answers are promised (25 ms: 40 tokens/s); a shared "
        "replica takes only as much batch as keeps it.",
        unit="ms",
        least=0.1,
    )
    ttft_slo_ms: float = settings.setting(
        0.0,
        "Time to first token that interactive answers are promised; a predicted wait above half of it is "
        "pressure. 0: as [scheduler] ttft_slo_ms says.",
        unit="ms",
        least=0,
    )

    def __post_init__(self) -> None:
        if self.reserved_seats > self.seats:
            raise ValueError(f"reserved_seats {self.reserved_seats} exceed seats {self.seats}")
        bounds.from_mapping(self.scaling)
        tunings.read(self.tuning)
        if weight_places.staged(self.weights):
            weight_places.parse(self.weights)
        if self.weight > 100:
            raise ValueError(f"weight {self.weight} is over 100 percent")
        if self.engine is not fleet.EngineKind.SIMULATED and not self.weights:
            raise ValueError(f"weights missing: engine {self.engine} needs a folder or a URL")

    def spec(self) -> fleet.ReplicaSpec:
        """Return how to start a replica of this model."""
        return fleet.ReplicaSpec(
            model=self.name,
            version=self.version,
            engine=self.engine,
            weights=self.weights,
            engine_args=dict(self.engine_args),
            seats=self.seats,
            reserved_seats=self.reserved_seats,
            max_context=self.max_context,
            gpus=self.gpus,
            adapters=dict(self.adapters),
            dedicated=self.dedicated,
            itl_slo_ms=self.itl_slo_ms,
            ttft_slo_ms=self.ttft_slo_ms,
            weights_digest=self.weights_digest,
            tuning=dict(self.tuning),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Everything that forebay.toml and the environment said, checked.

    Attributes:
        path: the file, None if there is none.
        tables: table name to its dataclass.
        models: the `[[models]]` entries in the file's order.
    """

    path: Path | None
    tables: Mapping[str, Any]
    models: tuple[ModelSettings, ...] = ()

    def table(self, kind: type[T]) -> T:
        """Return the table that is declared by the dataclass ``kind``."""
        for value in self.tables.values():
            if type(value) is kind:
                return value
        raise KeyError(f"no table is declared by {kind.__module__}.{kind.__qualname__}")


def load(
    path: Path | None, tables: Mapping[str, type], env: Mapping[str, str] | None = None
) -> Config:
    """Read and check a configuration.

    Args:
        path: the TOML file, or None for defaults and environment alone.
        tables: table name to the frozen dataclass that declares it.
        env: the environment; the process's own if not given.

    Raises:
        ConfigError: every fault found, each with ``file:line``.
    """
    environment = os.environ if env is None else env
    text = _read(path)
    source = toml_lines.Source(str(path) if path else "environment", text)
    document = _parse(source)
    faults: list[str] = []
    for name in document:
        if name not in tables and name != MODELS:
            faults.append(
                source.fault((name,), f"[{name}]", f"unknown table{_near(name, [*tables, MODELS])}")
            )
    values: dict[str, Any] = {}
    for name, kind in tables.items():
        body = document.get(name, {})
        if not isinstance(body, Mapping):
            faults.append(source.fault((name,), name, "must be a table: write [" + name + "]"))
            continue
        overrides = _overrides(name, kind, environment, faults)
        values[name] = _build(kind, body, overrides, _Place(source, (name,), f"[{name}]"), faults)
    models = _models(document.get(MODELS, []), source, faults)
    if faults:
        raise ConfigError(faults)
    return Config(path=path, tables=values, models=models)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a table's values come from, and how messages name it."""

    source: toml_lines.Source
    path: tuple[str | int, ...]
    label: str

    def fault(self, key: str, why: str) -> str:
        if not key:
            return self.source.fault(self.path, self.label, why)
        return self.source.fault((*self.path, key), f"{self.label} {key}", why)


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError([f"{path}:{line}: not UTF-8: save the file as UTF-8"]) from error


def _parse(source: toml_lines.Source) -> dict[str, Any]:
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        number = int(found[1]) if found else source.text.count("\n") + 1
        why = re.sub(r"\s*\(at .*\)$", "", str(error))
        raise ConfigError([f"{source.name}:{number}: not valid TOML: {why}"]) from error


def _overrides(
    table: str, kind: type, env: Mapping[str, str], faults: list[str]
) -> dict[str, tuple[str, str]]:
    """Return key → (variable, text) for what the environment sets; a near miss is a fault."""
    prefix = f"{PREFIX}{table.upper()}_"
    keys = {field.name.upper(): field.name for field in dataclasses.fields(kind)}
    found: dict[str, tuple[str, str]] = {}
    for variable, text in env.items():
        if not variable.startswith(prefix):
            continue
        rest = variable.removeprefix(prefix)
        if rest in keys:
            found[keys[rest]] = (variable, text)
        elif near := difflib.get_close_matches(rest, keys, n=1, cutoff=0.8):
            faults.append(f"environment: {variable}: unknown; did you mean {prefix}{near[0]}?")
    return found


def _build(
    kind: type,
    body: Mapping[str, Any],
    overrides: Mapping[str, tuple[str, str]],
    place: _Place,
    faults: list[str],
) -> Any:
    """Make one table's dataclass from the file's values and the environment's."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    before = len(faults)
    values: dict[str, Any] = {}
    for key, raw in body.items():
        if key not in fields:
            faults.append(place.fault(key, f"unknown key{_near(key, fields)}"))
        elif key not in overrides:
            try:
                values[key] = _checked(hints[key], fields[key], raw)
            except ValueError as error:
                faults.append(place.fault(key, str(error)))
    for key, (variable, text) in overrides.items():
        try:
            values[key] = _from_text(hints[key], fields[key], text)
        except ValueError as error:
            faults.append(f"environment: {variable}: {error}")
    for name, field in fields.items():
        if name not in body and name not in overrides and required(field):
            faults.append(place.fault("", f"{name} is missing"))
    if len(faults) > before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        faults.append(place.fault("", str(error)))
        return None


def _models(raw: Any, source: toml_lines.Source, faults: list[str]) -> tuple[ModelSettings, ...]:
    if not isinstance(raw, list):
        faults.append(source.fault((MODELS,), MODELS, "is a list: write [[models]]"))
        return ()
    models: list[ModelSettings] = []
    seen: set[tuple[str, str]] = set()
    for index, body in enumerate(raw):
        place = _Place(source, (MODELS, index), f"[[models]] #{index + 1}")
        model = _build(ModelSettings, body, {}, place, faults)
        if model is None:
            continue
        if (model.name, model.version) in seen:
            faults.append(place.fault("name", f"{model.name} {model.version} stands there twice"))
        seen.add((model.name, model.version))
        models.append(model)
    return tuple(models)


def _checked(hint: Any, field: "dataclasses.Field[Any]", raw: Any) -> Any:
    """Return ``raw`` as the field's type.

    Raises:
        ValueError: one line that says what is wrong with it.
    """
    try:
        # Strict JSON mode: "5" is no number, but text may name an enum member or a path.
        text = json.dumps(raw)
        value = pydantic.TypeAdapter(hint).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        inner = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{inner + ': ' if inner else ''}{first['msg']} (got {_short(raw)})"
        ) from error
    except TypeError as error:
        raise ValueError(f"dates and times are not used here (got {_short(raw)})") from error
    if isinstance(value, Path) and raw == "":  # Path("") is the folder in which we happen to be
        raise ValueError("must name a path (got nothing)")
    if isinstance(value, int | float):
        _bounded(field, value)
    return value


def _bounded(field: "dataclasses.Field[Any]", value: float) -> None:
    unit = f" {field.metadata['unit']}" if field.metadata.get("unit") else ""
    least, most = field.metadata.get("least"), field.metadata.get("most")
    if not math.isfinite(value):
        raise ValueError(f"must be finite (got {value})")
    if least is not None and value < least:
        raise ValueError(f"must be at least {least}{unit} (got {value})")
    if most is not None and value > most:
        raise ValueError(f"must be at most {most}{unit} (got {value})")


def _from_text(hint: Any, field: "dataclasses.Field[Any]", text: str) -> Any:
    """Return an environment variable's text as the field's type: as it stands, or as a TOML value."""
    try:
        return _checked(hint, field, text)
    except ValueError as plain:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            raise plain from None
        return _checked(hint, field, value)


def required(field: "dataclasses.Field[Any]") -> bool:
    """Return whether a table's key has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    if len(known) > _LISTED:
        return "; `forebay config example` has those that are known"
    return f"; known are {', '.join(known)}"


def _short(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
