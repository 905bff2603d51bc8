"""forebay.toml as a commented example: each key with its default, unit and reason."""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

from scheduler.runtime import config


def document(tables: Mapping[str, type]) -> str:
    """Return the example; each key stands there with its default, commented out.

    Args:
        tables: table name to the frozen dataclass that declares it.
    """
    lines = [
        "# forebay.toml: every table and key with its default.",
        "# Remove the # before a key to change it, or set FOREBAY_<TABLE>_<KEY> in the environment.",
    ]
    for name, kind in tables.items():
        lines += ["", f"[{name}]"]
        lines += [line for field in dataclasses.fields(kind) for line in _describe(field)]
    lines += [
        "",
        "# Models are a list: repeat the table for each model, or for each version of one.",
    ]
    lines += [f"# [[{config.MODELS}]]"]
    lines += [
        line for field in dataclasses.fields(config.ModelSettings) for line in _describe(field)
    ]
    return "\n".join(lines) + "\n"


def _describe(field: "dataclasses.Field[Any]") -> list[str]:
    """Return a key's comment and its line; the key itself is commented out too."""
    unit = f" Unit: {field.metadata['unit']}." if field.metadata.get("unit") else ""
    comment = f"{field.metadata.get('doc', '')}{unit}".strip()
    if config.required(field):
        return ["", f"# {comment} Required.", f'# {field.name} = "..."']
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default is None:
        return ["", f"# {comment} Not set by default.", f"# {field.name} ="]
    return ["", f"# {comment}", f"# {field.name} = {_toml(default)}"]


def _toml(value: Any) -> str:
    """Render a default as a TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        body = ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items())
        return f"{{ {body} }}" if body else "{}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _toml({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return json.dumps(str(value), ensure_ascii=False)
