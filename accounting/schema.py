"""The tables as Parquet holds them: texts stay texts, counts and times stay integers.

Times are int64 µs UTC (names end in ``_us``) and not Arrow timestamps: one form from the spool to JSON,
no session's time zone can move a row to another day, and every sum is exact. Ids and team names are
strings even where they look like numbers (`007`, `1e3`). A row belongs to the UTC day of its beginning: an
attempt's is the arrival of its request, which every row of every attempt carries (one that was refused in
the queue has no dispatch), so that all rows of one request lie in one partition and one window.
"""

import datetime
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from accounting import segment
from scheduler.contracts import usage

USAGE = "usage"
GPU = "gpu"
REPLICA_TIME = "replica_time"
TABLES = (USAGE, GPU, REPLICA_TIME)

_TAGS = {USAGE: "u", GPU: "g", REPLICA_TIME: "r"}
_US_A_DAY = 86_400_000_000
_EPOCH = datetime.date(1970, 1, 1)
_LAST_DAY = (datetime.date.max - _EPOCH).days


def columns(table: str) -> tuple[str, ...]:
    """Return a table's column names in order."""
    return segment.COLUMNS[_TAGS[table]]


def schema(table: str) -> Any:
    """Return a table's Arrow schema; nothing in it may be null."""
    return pa.schema(
        [
            pa.field(
                name, pa.string() if name in segment.TEXT_COLUMNS else pa.int64(), nullable=False
            )
            for name in columns(table)
        ]
    )


def table_of(row: usage.Row) -> str:
    """Return which table a row belongs to."""
    if isinstance(row, usage.UsageRow):
        return USAGE
    return GPU if isinstance(row, usage.GpuRow) else REPLICA_TIME


def span(row: usage.Row) -> tuple[int, int]:
    """Return when a row began and ended, UTC µs (the end is the beginning if it has none)."""
    if isinstance(row, usage.UsageRow):
        arrived_us = row.identity.arrived_us
        return arrived_us, max(arrived_us, row.identity.started_us, row.ended_us)
    return row.start_us, max(row.start_us, row.end_us)


def day_of(us: int) -> str:
    """Return the UTC day of a time as ``YYYY-MM-DD``, by integers alone."""
    return (_EPOCH + datetime.timedelta(days=min(us // _US_A_DAY, _LAST_DAY))).isoformat()


def to_arrow(table: str, rows: Iterable[usage.Row]) -> Any:
    """Return rows of one table as an Arrow table."""
    wanted = schema(table)
    by_column = list(zip(*map(segment.values_of, rows), strict=True))[1:]
    if not by_column:
        return wanted.empty_table()
    arrays = [
        pa.array(
            [_text(value) for value in column] if field.type == pa.string() else column, field.type
        )
        for column, field in zip(by_column, wanted, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=wanted)


def _text(value: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 can't."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
