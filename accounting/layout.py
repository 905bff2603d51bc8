"""How facct and freport print: sacct's columns, widths, `+` for a cut cell, and parsable lines. Pure.

Unlike sacct, a delimiter or a line break inside a value is escaped, so that no name can shift a field.
"""

import csv
import dataclasses
import datetime
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from scheduler.contracts import command_line
from scheduler.contracts.command_line import CommandError

_WIDTH = re.compile(r"-?\d{1,6}", re.ASCII)
_LISTED = 20  # fields that a refusal names; facct, which has more, lists them itself
_WIDEST = 1_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", re.ASCII)
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One field: its name, default width (negative: left-aligned), and its text for a row.

    Attributes:
        point: in aligned lines the decimal points stand below each other.
    """

    name: str
    width: int
    text: Callable[[Row, datetime.tzinfo], str]
    doc: str = ""
    point: bool = False


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
        CommandError: an unknown name, or a width that is no number or too large.
    """
    chosen = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, percent, width = item.partition("%")
        column = _find(name, known)
        if percent:
            if not _WIDTH.fullmatch(width) or not 1 <= abs(int(width)) <= _WIDEST:
                raise CommandError(
                    f'invalid width in "{item}": write it as {column.name}%20 or %-20, up to {_WIDEST}'
                )
            column = dataclasses.replace(column, width=int(width))
        chosen.append(column)
    if not chosen:
        raise CommandError(f"no field requested: {_names(known)}")
    return chosen


def _find(name: str, known: Sequence[Column]) -> Column:
    word = name.lower()
    exact = [column for column in known if column.name.lower() == word]
    begun = [column for column in known if word and column.name.lower().startswith(word)]
    for column in (*exact, *begun):
        return column
    raise CommandError(f'invalid field requested: "{name}": {_names(known)}')


def _names(known: Sequence[Column]) -> str:
    if len(known) > _LISTED:
        return "see --helpformat"
    return f"there are {', '.join(column.name for column in known)}"


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
    for number, column in enumerate(columns):
        if column.point:
            _pad(cells, number, abs(column.width))
    for line in cells:
        print(_aligned([escaped(cell, "") for cell in line], widths), file=out)


def _pad(cells: Sequence[list[str]], place: int, width: int) -> None:
    """Give the numbers of a column as many characters after the point, as far as they fit."""
    most = max((_places(line[place]) for line in cells), default=0)
    for line in cells:
        more = min(most - _places(line[place]), width - len(line[place]))
        line[place] += " " * max(0, more)


def _places(cell: str) -> int:
    return len(cell.partition(".")[2])


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
        cell = cell.replace("\\", "\\\\")
        # Its first character alone: a cell that ends in it must not make a longer delimiter with the next.
        if delimiter[0].isprintable():
            cell = cell.replace(delimiter[0], f"\\{delimiter[0]}")
    return command_line.printable(cell)


def harmless(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula: one that begins like it gets a ``'`` before it.

    A number may begin with a sign. The full-width signs are what some locales read as the plain ones.
    """
    if not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


def write_csv(
    columns: Sequence[Column],
    rows: Sequence[Row],
    tz: datetime.tzinfo,
    out: TextIO,
    *,
    header: bool = True,
) -> None:
    """Write the columns as CSV, with a header unless it is not wanted."""
    lines = ([column.text(row, tz) for column in columns] for row in rows)
    csv_lines([column.name for column in columns] if header else [], lines, out)


def csv_lines(names: Sequence[str], lines: Iterable[Sequence[object]], out: TextIO) -> None:
    """Write cells as CSV that a spreadsheet may open; without names there is no header."""
    writer = csv.writer(out, lineterminator="\n")
    if names:
        writer.writerow(map(harmless, names))
    for line in lines:
        writer.writerow([harmless(cell) if isinstance(cell, str) else cell for cell in line])


def types_of(*records: type) -> dict[str, type]:
    """Return the columns that rows of these dataclasses have, with their types: str, int or bool."""
    found: dict[str, type] = {}
    for record in records:
        hints = typing.get_type_hints(record)
        for field in dataclasses.fields(record):
            hint = hints[field.name]
            kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type)]
            for kind in (bool, int, str):
                if any(issubclass(each, kind) for each in kinds):
                    found[field.name] = kind
                    break
    return found


def write_parquet(rows: Sequence[Row], path: Path, known: Mapping[str, type]) -> None:
    """Write the rows as they came, integers as int64 and texts as strings; what is not known is null.

    Args:
        rows: of one report.
        path: where to.
        known: the report's columns with their types (str, int or bool), which are there without rows too.

    Raises:
        CommandError: the file can't be written, or a value fits into no column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[type, Any] = {str: pa.string(), int: pa.int64(), bool: pa.bool_()}
    found = (name for row in rows for name in row if not isinstance(row[name], list))
    names = dict.fromkeys((*known, *found))
    try:
        columns = {
            name: pa.array([row.get(name) for row in rows], types.get(known.get(name, object)))
            for name in names
        }
        pq.write_table(pa.table(columns), path, compression="zstd")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}: choose another file") from error
    except (pa.ArrowException, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise CommandError(f"{path}: a value fits into no column ({why}): use --json") from error


def decimal(value: int, scale: int, places: int) -> str:
    """Return ``value / scale`` with that many places, rounded half up, by integers alone."""
    unit = 10**places
    rounded = (2 * abs(value) * unit + scale) // (2 * scale)
    sign = "-" if value < 0 and rounded else ""
    if not places:
        return f"{sign}{rounded}"
    return f"{sign}{rounded // unit}.{rounded % unit:0{places}}"
