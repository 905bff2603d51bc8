"""How facct and freport print: sacct's columns, widths, `+` for a cut cell, and parsable lines. Pure.

Unlike sacct, a delimiter or a line break inside a value is escaped, so that no name can shift a field.
"""

import csv
import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from scheduler.contracts.command_line import CommandError

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One field: its name, default width (negative: left-aligned), and its text for a row."""

    name: str
    width: int
    text: Callable[[Row, datetime.tzinfo], str]
    doc: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """How lines are printed.

    Attributes:
        delimiter: between the fields of a parsable line; "" prints aligned columns.
        closed: whether a parsable line ends in the delimiter (``-p``).
        header: whether the names come first.
    """

    delimiter: str = ""
    closed: bool = False
    header: bool = True


def choose(text: str, known: Sequence[Column]) -> list[Column]:
    """Return the columns of a comma list such as ``jobid,state%20,team%-8``.

    Names match without case, by prefix; the first in order wins, as with sacct.

    Raises:
        CommandError: an unknown name, or a width that is no number.
    """
    chosen = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, percent, width = item.partition("%")
        column = _find(name, known)
        if percent:
            if not width.removeprefix("-").isdigit() or int(width) == 0:
                raise CommandError(
                    f'invalid width in "{item}": write it as {column.name}%20 or %-20'
                )
            column = dataclasses.replace(column, width=int(width))
        chosen.append(column)
    if not chosen:
        raise CommandError("no field requested: see --helpformat")
    return chosen


def _find(name: str, known: Sequence[Column]) -> Column:
    word = name.lower()
    exact = [column for column in known if column.name.lower() == word]
    begun = [column for column in known if word and column.name.lower().startswith(word)]
    for column in (*exact, *begun):
        return column
    raise CommandError(f'invalid field requested: "{name}": see --helpformat')


def print_fields(known: Sequence[Column], out: TextIO) -> None:
    """Print what ``--helpformat`` shows: each field and what it means."""
    longest = max(len(column.name) for column in known)
    for column in known:
        print(f"{column.name:<{longest}}  {column.doc}".rstrip(), file=out)


def print_rows(
    columns: Sequence[Column], rows: Sequence[Row], tz: datetime.tzinfo, style: Style, out: TextIO
) -> None:
    """Print rows as aligned columns, or as parsable lines."""
    names = [column.name for column in columns]
    cells = [[column.text(row, tz) for column in columns] for row in rows]
    if style.delimiter:
        end = style.delimiter if style.closed else ""
        for line in ([names] if style.header else []) + cells:
            shown = (escaped(cell, style.delimiter) for cell in line)
            print(style.delimiter.join(shown) + end, file=out)
        return
    widths = [column.width for column in columns]
    if style.header:
        print(_aligned(names, widths), file=out)
        print(" ".join("-" * abs(width) for width in widths), file=out)
    for line in cells:
        print(_aligned([escaped(cell, "") for cell in line], widths), file=out)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    parts = []
    for cell, width in zip(cells, widths, strict=True):
        size = abs(width)
        shown = cell if len(cell) <= size else cell[: size - 1] + "+"
        parts.append(shown.ljust(size) if width < 0 else shown.rjust(size))
    return " ".join(parts).rstrip()


def escaped(cell: str, delimiter: str) -> str:
    """Return a cell in which nothing steers a terminal, breaks the line or looks like the delimiter."""
    if delimiter:
        cell = cell.replace("\\", "\\\\").replace(delimiter, f"\\{delimiter}")
    if cell.isprintable():
        return cell
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cell
    )


def write_csv(
    columns: Sequence[Column], rows: Sequence[Row], tz: datetime.tzinfo, out: TextIO
) -> None:
    """Write the columns as CSV with a header."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([[column.text(row, tz) for column in columns] for row in rows])


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as they came, integers as int64 and texts as strings.

    Raises:
        CommandError: the file can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table, path, compression="zstd")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}: choose another file") from error


def decimal(value: int, scale: int, places: int) -> str:
    """Return ``value / scale`` with that many places, rounded half up, by integers alone."""
    unit = 10**places
    rounded = (2 * abs(value) * unit + scale) // (2 * scale)
    sign = "-" if value < 0 and rounded else ""
    if not places:
        return f"{sign}{rounded}"
    return f"{sign}{rounded // unit}.{rounded % unit:0{places}}"
