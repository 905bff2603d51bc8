"""A segment's rows as Arrow columns, without a Python object for each value.

Compact rows have numbers of fixed width: all of a segment are one array. Rows of text of one kind are one CSV
text with the unit separator for a comma, and Arrow reads that. What needs more than that (a segment of the
first release, a value of no valid form) goes row by row through `accounting.decoding`, so that the fault is
named and the other rows are kept.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from accounting import decoding, records, schema, segment
from scheduler.contracts import usage

_PARSE = csv.ParseOptions(
    delimiter=records.SEPARATOR,
    quote_char=False,
    ignore_empty_lines=False,
    newlines_in_values=False,
)
_SEPARATOR = records.SEPARATOR.encode()
_BLOCK_BYTES = 1024 * 1024  # ten times the longest row
_WORDS: Mapping[str, frozenset[str]] = {
    "kind": frozenset(usage.RowKind),
    "outcome": frozenset(usage.Outcome),
    "payer": frozenset(usage.Payer),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A segment's rows by table; `problem` is one line on what could not be read, or ""."""

    tables: Mapping[str, Any]
    count: int
    problem: str


class _Slow(Exception):
    """These rows want to be read one by one."""


def read(found: segment.Scan) -> Rows:
    """Decode a scanned segment."""
    try:
        tables = _fast(found)
        problem = segment.problem_of(found.name, found.faults, len(found.payloads))
        return Rows(tables, len(found.payloads), problem)
    except (_Slow, pa.ArrowInvalid, LookupError, ValueError, TypeError):
        slow = decoding.decode(found)
        return Rows(of_rows(slow.rows), len(slow.rows), slow.problem)


def of_rows(rows: Iterable[usage.Row]) -> dict[str, Any]:
    """Return rows as Arrow tables, by table."""
    groups: dict[str, list[usage.Row]] = {}
    for row in rows:
        groups.setdefault(schema.table_of(row), []).append(row)
    return {table: schema.to_arrow(table, group) for table, group in groups.items()}


def _fast(found: segment.Scan) -> dict[str, Any]:
    groups: dict[bytes, list[bytes]] = {}
    for payload in found.payloads:
        groups.setdefault(payload[:1], []).append(payload)
    tables = {}
    if compact := groups.pop(records.COMPACT, None):
        tables[schema.USAGE] = _compact(found, compact)
    for begin, payloads in groups.items():
        tag = begin.decode()
        if tag not in records.COLUMNS or any(each[1:2] != _SEPARATOR for each in payloads):
            raise _Slow
        table = next(name for name, its in schema.TAGS.items() if its == tag)
        part = _table(table, payloads, found.header["columns"][tag])
        tables[table] = joined(table, [tables[table], part]) if table in tables else part
    return tables


def _compact(found: segment.Scan, payloads: Sequence[bytes]) -> Any:
    layout = found.header["compact"]
    form = np.dtype(
        [("", "S1")]
        + [
            (name, f"S{code[:-1]}" if code.endswith("s") else f"<{code}")
            for name, code in layout["fields"]
        ]
    )
    if any(len(payload) != form.itemsize for payload in payloads):
        raise _Slow
    rows = np.frombuffer(b"".join(payloads), form)
    texts = [records.defined(payload) for payload in found.shared]
    columns: dict[str, Any] = {}
    for group, names in layout["groups"].items():
        columns.update(_shared(group, names, texts, rows[group]))
    for name, code in layout["fields"]:
        if name not in layout["groups"]:
            values = rows[name]
            columns[name] = (
                _ids(values) if code.endswith("s") else pa.array(values.astype(np.int64))
            )
    whole = {name: pa.chunked_array([column]) for name, column in columns.items()}
    return _completed(schema.USAGE, whole, len(payloads))


def _shared(
    group: str, names: Sequence[str], texts: Sequence[Sequence[str]], numbers: Any
) -> dict[str, Any]:
    """Return a group's columns by the numbers of their definitions, each text once."""
    used = np.flatnonzero(np.bincount(numbers, minlength=len(texts))).tolist()
    rows = [texts[number] for number in used]  # IndexError: no such definition
    if any(len(row) != len(names) + 1 or row[0] != group for row in rows):
        raise _Slow
    found = {}
    for place, name in enumerate(names, 1):
        words = dict.fromkeys(row[place] for row in rows)
        places = {word: number for number, word in enumerate(words)}
        chosen = np.zeros(len(texts), np.int32)
        chosen[used] = [places[row[place]] for row in rows]
        found[name] = pa.DictionaryArray.from_arrays(
            pa.array(chosen[numbers]), pa.array(list(words), pa.string())
        )
    return found


def _ids(column: Any) -> Any:
    """Return texts that all have the same length in bytes."""
    letters = np.ascontiguousarray(column).view(np.uint8)
    if letters.max() > 127:
        raise _Slow
    ends = np.arange(len(column) + 1, dtype=np.int32) * column.dtype.itemsize
    return pa.StringArray.from_buffers(len(column), pa.py_buffer(ends), pa.py_buffer(letters))


def _completed(table: str, found: Mapping[str, Any], rows: int) -> Any:
    """Return columns as a table of today's, checked; one that its writer did not know has its default."""
    wanted = schema.held(table)
    return pa.Table.from_arrays(
        [
            _checked(field.name, found[field.name].cast(field.type))
            if field.name in found
            else pa.repeat(pa.scalar(schema.default(table, field.name), field.type), rows)
            for field in wanted
        ],
        schema=wanted,
    )


def _table(table: str, payloads: Sequence[bytes], names: Sequence[str]) -> Any:
    wanted = schema.held(table)
    types = {field.name: field.type for field in wanted}
    there = [name for name in wanted.names if name in names]
    read_in = csv.read_csv(
        pa.BufferReader(b"\n".join(payloads)),
        read_options=csv.ReadOptions(column_names=["", *names], block_size=_BLOCK_BYTES),
        parse_options=_PARSE,
        convert_options=csv.ConvertOptions(
            include_columns=there, column_types=types, null_values=[], strings_can_be_null=False
        ),
    )
    if read_in.num_rows != len(payloads):
        raise _Slow
    columns = {name: read_in[name] for name in there}
    for column in columns.values():
        if pa.types.is_integer(column.type):
            continue
        if pc.any(pc.match_substring(_words(column), "\\")).as_py():
            raise _Slow
    return _completed(table, columns, len(payloads))


def _checked(name: str, column: Any) -> Any:
    if pa.types.is_integer(column.type):
        if pc.min(column).as_py() < 0:
            raise _Slow
    elif (allowed := _WORDS.get(name)) and not allowed.issuperset(_words(column).to_pylist()):
        raise _Slow
    return column


def _words(column: Any) -> Any:
    """Return the texts of a column, each once if it has a dictionary."""
    if not pa.types.is_dictionary(column.type):
        return column
    return column.unify_dictionaries().chunk(0).dictionary


def joined(table: str, parts: Sequence[Any]) -> Any:
    """Return the rows of several segments as one table."""
    if not parts:
        return schema.held(table).empty_table()
    return pa.concat_tables(parts).unify_dictionaries()


def newest(table: str, rows: Any) -> Any:
    """Return rows without those that a later one of the same key extends (see `usage.GpuRow`)."""
    if table == schema.USAGE:
        return rows
    keys = ["cluster", "lease_id", "run" if table == schema.GPU else "replica_id", "seq"]
    rows = rows.take(pc.sort_indices(rows["end_us"]))
    numbered = rows.append_column("place", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(keys, use_threads=False).aggregate([("place", "last")])["place_last"]
    return rows.take(last)


def days(table: str, rows: Any) -> set[str]:
    """Return the UTC days that rows belong to."""
    numbers = pc.unique(pc.divide(rows[schema.begin_column(table)], schema.US_A_DAY))
    return {schema.day_of(number * schema.US_A_DAY) for number in numbers.to_pylist()}


def by_day(table: str, rows: Any) -> list[tuple[str, Any]]:
    """Part rows by the UTC day that they belong to, ascending."""
    days = pc.divide(rows[schema.begin_column(table)], schema.US_A_DAY)
    found: dict[str, list[int]] = {}
    for day in pc.unique(days).to_pylist():
        found.setdefault(schema.day_of(day * schema.US_A_DAY), []).append(day)
    if len(found) == 1:
        return [(next(iter(found)), rows)]
    return [
        (name, rows.filter(pc.is_in(days, pa.array(numbers, pa.int64()))))
        for name, numbers in sorted(found.items())
    ]


def span(table: str, rows: Any) -> tuple[int, int]:
    """Return the earliest beginning and the latest end of rows, UTC µs; there is one at least."""
    ends = (
        ("arrived_us", "started_us", "ended_us")
        if table == schema.USAGE
        else ("start_us", "end_us")
    )
    first = pc.min(rows[ends[0]]).as_py()
    return first, max(pc.max(rows[name]).as_py() for name in ends)
