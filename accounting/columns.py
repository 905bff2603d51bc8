"""A segment's rows as Arrow columns, without a Python object for each value.

Rows of one kind are one CSV text with the unit separator for a comma, and Arrow reads that. What needs
more than that (a segment of the first release, a value of no valid form) goes row by row through
`accounting.segment`, so that the fault is named and the other rows are kept.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from accounting import schema, segment
from scheduler.contracts import usage

_PARSE = csv.ParseOptions(
    delimiter=segment.SEPARATOR,
    quote_char=False,
    ignore_empty_lines=False,
    newlines_in_values=False,
)
_BLOCK_BYTES = 1024 * 1024  # ten times the longest row
_WORDS: Mapping[str, frozenset[str]] = {
    "kind": frozenset(usage.RowKind),
    "outcome": frozenset(usage.Outcome),
    "payer": frozenset(usage.Payer),
}
_NO_WORDS: frozenset[str] = frozenset()


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
    except (_Slow, pa.ArrowInvalid, LookupError, ValueError):
        slow = segment.decode(found)
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
        groups.setdefault(payload[:2], []).append(payload)
    tables = {}
    for begin, payloads in groups.items():
        tag = begin[:1].decode()
        if begin != f"{tag}{segment.SEPARATOR}".encode() or tag not in segment.COLUMNS:
            raise _Slow
        table = next(name for name, its in schema.TAGS.items() if its == tag)
        tables[table] = _table(table, payloads, found.header["columns"][tag])
    return tables


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
    columns = {name: _checked(name, read_in[name]) for name in there}
    return pa.Table.from_arrays(
        [
            columns[field.name]
            if field.name in columns
            else pa.repeat(pa.scalar(schema.default(table, field.name), field.type), len(payloads))
            for field in wanted
        ],
        schema=wanted,
    )


def _checked(name: str, column: Any) -> Any:
    if pa.types.is_integer(column.type):
        if pc.min(column).as_py() < 0:
            raise _Slow
        return column
    column = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column
    words = column.chunk(0).dictionary if pa.types.is_dictionary(column.type) else column
    if pc.any(pc.match_substring(words, "\\")).as_py():
        raise _Slow
    allowed = _WORDS.get(name, _NO_WORDS)
    if allowed and not allowed.issuperset(words.to_pylist()):
        raise _Slow
    return column


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
