"""Finds the line of a key in a TOML text, for errors that name it: the parser keeps no lines."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

_HEADER = re.compile(r"^\s*(\[\[|\[)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"^\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A file's name and text."""

    name: str
    text: str

    def line(self, place: Sequence[str | int]) -> int:
        """Return the line of a key (``("gateway", "port")``, ``("models", 1, "seats")``), 0 if absent."""
        best = 0
        depth = 0
        for number, path in _keys(self.text):
            if path == tuple(place):
                return number
            shared = len(path) if tuple(place[: len(path)]) == path else 0
            if shared > depth:
                best, depth = number, shared
        return best

    def fault(self, place: Sequence[str | int], what: str, why: str) -> str:
        """Return one line: where, what, why."""
        number = self.line(place)
        where = f"{self.name}:{number}" if number else self.name
        return f"{where}: {what}: {why}"


def _keys(text: str) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Yield the line and path of every table header and key (multi-line strings may add false ones)."""
    table: tuple[str | int, ...] = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            names = _dotted(header[2])
            if header[1] == "[[":
                counts[names[0]] = counts.get(names[0], -1) + 1
            head: tuple[str | int, ...] = (names[0],)
            if names[0] in counts:
                head = (names[0], counts[names[0]])
            table = (*head, *names[1:])
            yield number, table
        elif key := _KEY.match(line):
            names = _dotted(key[1])
            for depth in range(1, len(names) + 1):
                yield number, (*table, *names[:depth])


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
