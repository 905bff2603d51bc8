"""Slurm's host lists: ``n[1-3,5]-ib0`` to names and back. Pure."""

import re
from collections.abc import Iterable

MOST_HOSTS = 65_536  # Slurm's own MAX_RANGE; a typing error must not fill the memory
_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_NAME = re.compile(r"[^\s\[\],]+")


class HostlistError(ValueError):
    """A host list that can't be read; the message says where."""


def expand(text: str) -> list[str]:
    """Return the host names of a host list; order and duplicates are kept.

    Raises:
        HostlistError: a bracket that is not closed, a range that runs backwards, text after the last
            bracket (`n[1-2]x`, which Slurm refuses too), or more than `MOST_HOSTS` names.
    """
    hosts: list[str] = []
    for item in _items(text):
        hosts.extend(_expand_item(item))
        if len(hosts) > MOST_HOSTS:
            raise HostlistError(f"host list names more than {MOST_HOSTS} hosts: {text[:60]!r}")
    return hosts


def compress(hosts: Iterable[str]) -> str:
    """Return the shortest list for ``hosts`` in the order given: n3,n1,n2 is ``n[3,1-2]``."""
    out: list[str] = []
    prefix: str | None = None
    digits: list[str] = []

    def flush() -> None:
        if prefix is None:
            return
        out.append(f"{prefix}{digits[0]}" if len(digits) == 1 else f"{prefix}[{_ranges(digits)}]")

    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        if match is None:
            flush()
            prefix, digits = None, []
            out.append(host)
        elif match[1] == prefix:
            digits.append(match[2])
        else:
            flush()
            prefix, digits = match[1], [match[2]]
    flush()
    return ",".join(out)


def _items(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    if not text.strip():
        return []
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
        if depth not in {0, 1}:
            raise HostlistError(f"host list {text!r}: brackets don't match at {position + 1}")
    if depth:
        raise HostlistError(f"host list {text!r}: a bracket is not closed")
    items.append(text[start:])
    return [item.strip() for item in items]


def _expand_item(item: str) -> list[str]:
    if "[" not in item:
        if _NAME.fullmatch(item) is None:
            raise HostlistError(f"host list: {item!r} is not a host name")
        return [item]
    names, position = [""], 0
    for match in _PART.finditer(item):
        if match.start() != position:
            break
        position = match.end()
        numbers = _numbers(match[2], item)
        if len(names) * len(numbers) > MOST_HOSTS:
            raise HostlistError(f"host list names more than {MOST_HOSTS} hosts: {item[:60]!r}")
        names = [f"{name}{match[1]}{number}" for name in names for number in numbers]
    rest = item[position:]
    if rest and (position == 0 or rest[0] not in "-."):
        # "n[1-2]x" is refused as by Slurm; "n[1-2]-ib0" names a port of each node
        raise HostlistError(f"host list: {rest!r} after the last bracket of {item!r}")
    return [name + rest for name in names]


def _numbers(text: str, item: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise HostlistError(f"host list: {part!r} in {item!r} is not a range")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise HostlistError(f"host list: range {part!r} in {item!r} runs backwards")
        if int(high) - int(low) >= MOST_HOSTS:
            raise HostlistError(f"host list names more than {MOST_HOSTS} hosts: {item[:60]!r}")
        numbers.extend(str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
    return numbers


def _ranges(digits: list[str]) -> str:
    runs: list[tuple[str, str]] = []
    for number in digits:
        if runs and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in runs)
