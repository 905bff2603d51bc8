"""A models file's text: parsed without surprises, and the line of a fault that the registry names.

A key that stands there twice is refused: YAML's own loader keeps the last in silence.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from scheduler.contracts import command_line


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct, once every key has been seen to be there once."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


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
            found = yaml.load(self._text, _Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            why = getattr(error, "problem", None) or str(error)
            raise command_line.CommandError(f"{self.name}{line}: not valid YAML: {why}") from error
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
