"""A models file's text: parsed without surprises, and the line of a fault that the registry names.

A key that stands there twice is refused, and names stay as they are written: YAML's own loader keeps the
last in silence, and makes numbers and days of them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from scheduler.contracts import command_line

_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, and takes names as they stand there: no dates, no numbers."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose, and look at the keys as they are written: what `<<` merges comes later."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a name", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} stands there twice", key.start_mark
                )
            seen.add(key.value)
            key.tag = _TEXT  # else version 1.10 would be 1.1, and 2026-11-30 a day
        return node


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


def _plain(kind: str) -> Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]:
    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        text = _text(loader, node)
        return text if ":" in text else yaml.SafeLoader.yaml_constructors[kind](loader, node)

    return construct


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)
for _kind in _NUMBERS:  # 2:10 is a version's share, not 130
    _Loader.add_constructor(_kind, _plain(_kind))


def value(text: str) -> Any:
    """Return what a text of YAML says, of JSON's kinds alone.

    Raises:
        yaml.YAMLError: it is no YAML.
        ValueError: it says what JSON has no word for; the message is one line.
    """
    try:
        found = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        json.dumps(found, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"holds what is no text, number, list or mapping: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    return found


def read(name: str, stdin: TextIO | None = None) -> "Source":
    """Read a models file; ``-`` is the standard input.

    Raises:
        command_line.CommandError: it can't be read, or is not UTF-8.
    """
    try:
        text = (stdin.read() if stdin else "") if name == "-" else Path(name).read_text("utf-8")
    except OSError as error:
        raise command_line.CommandError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise command_line.CommandError(f"{name}: not UTF-8: save the file as UTF-8") from error
    return Source(name, text)


class Source:
    """One file's text."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text

    def document(self) -> dict[str, Any]:
        """Return what it says.

        Raises:
            command_line.CommandError: it is no YAML, or no mapping.
        """
        try:
            found = value(self._text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            why = getattr(error, "problem", None) or str(error)
            raise command_line.CommandError(f"{self.name}{line}: not valid YAML: {why}") from error
        except ValueError as error:
            raise command_line.CommandError(f"{self.name}: {error}") from error
        if found is None:
            found = {}
        if not isinstance(found, dict):
            raise command_line.CommandError(f"{self.name}: must hold `models:` and `profiles:`")
        return found

    def placed(self, message: str) -> str:
        """Return a fault with file and line: it begins with the dotted place of what is wrong."""
        place, sign, _ = message.partition(": ")
        if not sign or " " in place:
            return f"{self.name}: {message}"
        return f"{self.name}:{self._line(place)}: {message}"

    def _line(self, place: str) -> int:
        """Return the line of the deepest node on the way to ``place``, from 1."""
        node = yaml.compose(self._text, yaml.SafeLoader)
        line, rest = 1, place
        while isinstance(node, yaml.MappingNode) and rest:
            for key, value in node.value:
                name = str(key.value)
                if rest == name or rest.startswith(f"{name}."):
                    line, node, rest = key.start_mark.line + 1, value, rest[len(name) + 1 :]
                    break
            else:
                break
        return line


def nested(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"engine_args.x": 1}` as `{"engine_args": {"x": 1}}`: the first dot parts."""
    found: dict[str, Any] = {}
    for key, value in pairs.items():
        field, dot, item = key.partition(".")
        if dot:
            found.setdefault(field, {})[item] = value
        else:
            found[key] = value
    return found
