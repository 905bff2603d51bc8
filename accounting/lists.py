"""Comma lists of names, as options and the usage API take them. Pure.

A name that holds a comma or a quotation mark is written as CSV writes it: ``"smith, jones",red``.
"""

import csv
from collections.abc import Iterable


def read(text: str) -> tuple[str, ...]:
    """Return the names of a list; empty ones are left out.

    Raises:
        ValueError: a quotation mark has no other; the message is one line.
    """
    try:
        rows = list(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(
            f'invalid list {text!r}: write a name with a comma as "a, b" and a quotation mark twice'
        ) from error
    return tuple(name for row in rows for name in row if name)


def write(names: Iterable[str]) -> str:
    """Return names as `read` takes them."""
    return ",".join(_quoted(name) for name in names)


def _quoted(name: str) -> str:
    if not set(name) & {",", '"', "\r", "\n"}:
        return name
    return '"' + name.replace('"', '""') + '"'
