"""The tables as Parquet holds them: texts stay texts, counts and times stay integers.

Times are int64 µs UTC (names end in ``_us``) and not Arrow timestamps: one form from the spool to JSON,
no session's time zone can move a row to another day, and every sum is exact. Ids and team names are
strings even where they look like numbers (`007`, `1e3`). A row belongs to the UTC day of its beginning: an
attempt's is the arrival of its request, which every row of every attempt carries (one that was refused in
the queue has no dispatch), so that all rows of one request lie in one partition and one window.
"""

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from accounting import records
from scheduler.contracts import usage

USAGE = "usage"
GPU = "gpu"
REPLICA_TIME = "replica_time"
TABLES = (USAGE, GPU, REPLICA_TIME)

TAGS = {USAGE: "u", GPU: "g", REPLICA_TIME: "r"}
US_A_DAY = 86_400_000_000
_EPOCH = datetime.date(1970, 1, 1)
_LAST_DAY = (datetime.date.max - _EPOCH).days


def columns(table: str) -> tuple[str, ...]:
    """Return a table's column names in order."""
    return records.COLUMNS[TAGS[table]]


def schema(table: str) -> Any:
    """Return a table's Arrow schema; nothing in it may be null."""
    return pa.schema(
        [
            pa.field(
                name, pa.string() if name in records.TEXT_COLUMNS else pa.int64(), nullable=False
            )
            for name in columns(table)
        ]
    )


RECORDS = {
    USAGE: (usage.Identity, usage.UsageRow),
    GPU: (usage.GpuRow,),
    REPLICA_TIME: (usage.ReplicaTimeRow,),
}
_DEFAULTS: dict[tuple[str, str], str | int] = {
    (table, field.name): field.default
    for table, kinds in RECORDS.items()
    for record in kinds
    for field in dataclasses.fields(record)
    if field.default is not dataclasses.MISSING
}
_ALL_DIFFERENT = frozenset({"request_id", "custom_id", "caller_request_id", "reason"})
_TIMES = ("arrived_us", "started_us", "first_token_us", "ended_us", "start_us", "end_us", "busy_us")
_SORTED = frozenset({"request_id", "custom_id", "caller_request_id", *_TIMES})

_BILLED = frozenset(
    (
        *("payer", "cluster", "team", "model", "tier", "endpoint", "attempt"),
        *("uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens", "waste_tokens"),
    )
)

# Columns that every file has; what came later may be missing from one.
_FIRST = """
request_id attempt cluster team user key_id model version adapter endpoint tier replica_id
lease_id slurm_job_id arrived_us started_us batch_job_id custom_id caller_request_id kind outcome
uncached_prompt_tokens cached_prompt_tokens output_tokens first_token_us ended_us payer reason
run node gpus start_us end_us seq state
"""
FIRST_RELEASE = frozenset(_FIRST.split())


def default(table: str, name: str) -> str | int:
    """Return what a row has in a column that its writer, of another release, did not know."""
    blank: str | int = "" if name in records.TEXT_COLUMNS else 0
    return _DEFAULTS.get((table, name), blank)


def layout(table: str) -> dict[str, Any]:
    """Return how a table's Parquet files are written, as arguments for pyarrow.

    Ids and times are in order or nearly so: differences are a few bytes where values take eight and more.
    """
    ordered = {
        name: "DELTA_BYTE_ARRAY" if name in records.TEXT_COLUMNS else "DELTA_BINARY_PACKED"
        for name in columns(table)
        if name in _SORTED
    }
    return {
        # What every bill reads: dictionaries and runs have made it small, and zstd costs more than it saves.
        "compression": {
            name: "none" if table == USAGE and name in _BILLED else "zstd"
            for name in columns(table)
        },
        "store_schema": False,
        "use_dictionary": [name for name in columns(table) if name not in ordered],
        "column_encoding": ordered,
    }


def text_type(name: str) -> Any:
    """Return how a text column is held in memory: with a dictionary where values repeat."""
    return pa.string() if name in _ALL_DIFFERENT else pa.dictionary(pa.int32(), pa.string())


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
    return (_EPOCH + datetime.timedelta(days=min(us // US_A_DAY, _LAST_DAY))).isoformat()


def lies_within(day: str, first_us: int, last_us: int) -> bool:
    """Return whether all of a UTC day, by its name, is in ``[first_us, last_us)``."""
    begin = (datetime.date.fromisoformat(day) - _EPOCH).days * US_A_DAY
    return first_us <= begin and begin + US_A_DAY <= last_us


def lies_outside(day: str, first_us: int, last_us: int) -> bool:
    """Return whether nothing of a UTC day, by its name, is in ``[first_us, last_us)``."""
    begin = (datetime.date.fromisoformat(day) - _EPOCH).days * US_A_DAY
    return last_us <= begin or begin + US_A_DAY <= first_us


def held(table: str) -> Any:
    """Return the schema of a table in memory: texts that repeat have a dictionary."""
    return pa.schema(
        [
            field if pa.types.is_integer(field.type) else field.with_type(text_type(field.name))
            for field in schema(table)
        ]
    )


def begin_column(table: str) -> str:
    """Return the column whose day a row belongs to."""
    return "arrived_us" if table == USAGE else "start_us"


def to_arrow(table: str, rows: Iterable[usage.Row]) -> Any:
    """Return rows of one table as an Arrow table, of schema `held`."""
    wanted = held(table)
    by_column = list(zip(*map(records.values_of, rows), strict=True))[1:]
    if not by_column:
        return wanted.empty_table()
    arrays = [
        pa.array(
            column if pa.types.is_integer(field.type) else list(map(_text, column)), field.type
        )
        for column, field in zip(by_column, wanted, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=wanted)


def _text(value: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 can't."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
