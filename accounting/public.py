"""The tables for a site's own SQL: ``usage``, ``gpu_minutes``, ``rates`` and ``bill`` (docs/sql.md).

A session is DuckDB in memory over the recorded files: reading can't change anything, nor wait for a writer,
and it sees each row once whatever is being shipped, compacted or rolled up meanwhile. `export` writes the
same tables as Parquet for everything that does not speak to DuckDB.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from accounting import (
    bill,
    billing,
    books,
    gpu_lines,
    gpu_minutes,
    gpu_sums,
    settings,
    stepcost,
    windows,
)
from scheduler.contracts import errors
from scheduler.contracts.command_line import CommandError

TABLES = ("usage", "gpu_minutes", "rates", "bill")
_MONTHS_AT_MOST = 240
_RATES = pa.schema(
    [
        *((name, pa.string()) for name in ("model", "tier", "what")),
        *((name, pa.int64()) for name in ("price", "per", "from_us", "posting", "added_us")),
        *((name, pa.string()) for name in ("author", "reason")),
    ]
)
_MINUTES = pa.schema(
    [
        ("minute_us", pa.int64()),
        *((name, pa.string()) for name in ("cluster", "lease_id", "replica_id", "version")),
        *((name, pa.string()) for name in ("team", "user", "model", "tier", "endpoint")),
        *((name, pa.string()) for name in ("kind", "why")),
        ("gpu_us", pa.int64()),
    ]
)


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """A session with the four tables over a window.

    Attributes:
        session: DuckDB's connection, in UTC.
        problems: one line for each thing that could not be read; what it held is in no table.
    """

    session: Any
    problems: tuple[str, ...]


@contextlib.contextmanager
def opened(state_dir: Path, table: settings.Accounting, window: windows.Window) -> Iterator[Tables]:
    """Open the tables over a window; it blocks, and needs to read the state folder's files.

    ``usage`` has the attempts whose request arrived in the window, ``gpu_minutes`` its minutes, ``bill``
    the bills of the months that it touches; ``rates`` is all of them.
    """
    records = books.Books(state_dir, memory_mb=table.memory_mb)
    office = billing.Billing(state_dir, table)
    lines, problems = _lines(office, window)
    with records.reading(window.start_us, window.end_us) as reading:
        session = reading.session
        session.register("gpu_minutes", minutes(records, table, window))
        session.register("rates", _rates(office))
        session.register("bill", lines)
        _confine(session, state_dir / "parquet")
        yield Tables(session, tuple(dict.fromkeys((*reading.problems, *problems))))


def _confine(session: Any, folder: Path) -> None:
    """Let a query reach the recorded files and no other; who runs it must see that it only reads them."""
    session.execute(
        f"SET allowed_directories = [{_text(f'{folder.resolve()}/')}, {_text(f'{folder}/')}]"
    )
    session.execute("SET enable_external_access = false")
    session.execute("SET lock_configuration = true")


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def query(tables: Tables, text: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run one query; returns the names of its columns and its rows.

    Raises:
        CommandError: it is not one query, or would change something: DuckDB may write where it may read.
        duckdb.Error: it can't be run.
    """
    found = tables.session.extract_statements(text)
    if [each.type for each in found] != [duckdb.StatementType.SELECT]:
        raise CommandError("one query that only reads is run: write SELECT, or use --export DIR")
    answer = tables.session.execute(found[0])
    return [column[0] for column in answer.description], answer.fetchall()


def export(tables: Tables, folder: Path) -> list[Path]:
    """Write each table as ``NAME.parquet``; returns the files.

    Raises:
        CommandError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name in TABLES:
            path = folder / f"{name}.parquet"
            rows = tables.session.table(name).to_arrow_reader()
            with pq.ParquetWriter(path, rows.schema, compression="zstd") as writer:
                for batch in rows:
                    writer.write_batch(batch)
            written.append(path)
        return written
    except OSError as error:
        why = error.strerror or str(error).partition("\n")[0]
        raise CommandError(f"{folder}: {why}: choose another folder") from error


def _rates(office: billing.Billing) -> Any:
    rows = [
        {
            "model": rate.model,
            "tier": rate.tier,
            "what": rate.use.value,
            "price": rate.micro,
            "per": rate.use.per,
            "from_us": rate.from_us,
            "posting": rate.posting,
            "added_us": rate.added_us,
            "author": rate.author,
            "reason": rate.reason,
        }
        for rate in office.price_list().all
    ]
    return pa.Table.from_pylist(rows, schema=_RATES)


def _lines(office: billing.Billing, window: windows.Window) -> tuple[Any, Sequence[str]]:
    month, last = (bill.month_of(us, office.tz) for us in (window.start_us, window.end_us - 1))
    rows: list[bill.Line] = []
    problems: list[str] = []
    for _ in range(_MONTHS_AT_MOST):
        made = office.month(month)
        problems += (*made.problems, *made.doubtful)
        rows += made.lines
        if month >= last:
            break
        month = bill.after(month)
    try:
        return billing.table_of(rows), problems
    except errors.BadRequest as error:
        raise CommandError(error.message) from error


def minutes(records: books.Books, table: settings.Accounting, window: windows.Window) -> Any:
    """Return ``gpu_minutes`` of a window: whole hours as they were written, the rest as of now. Blocks."""
    folder = records.state_dir / gpu_minutes.FOLDER
    otherwise = stepcost.Cost(table.prefill_weight, table.decode_weight)
    parts, covered = [], []
    stored = gpu_minutes.current(records.state_dir, window.start_us, window.end_us)
    for hour_us, hour in stored.items():
        covered.append(hour_us)
        parts.append(pq.read_table(folder / hour.file, partitioning=None))
    for first, last in gpu_sums.gaps(covered, window.start_us, window.end_us):
        with records.reading(max(0, first - gpu_minutes.LONGEST_REQUEST_US), last) as reading:
            found = gpu_sums.live(reading, first, last, otherwise, folder=folder)
            if found is not None:
                parts.append(found)
    if not parts:
        return _MINUTES.empty_table()
    whole = pa.concat_tables(parts, promote_options="default")
    minute = whole["minute_us"]
    begins = window.start_us // gpu_lines.MINUTE_US * gpu_lines.MINUTE_US
    inside = pc.and_(pc.greater_equal(minute, begins), pc.less(minute, window.end_us))
    return whole.filter(inside).select(_MINUTES.names)


def this_month(now: datetime.datetime, tz: datetime.tzinfo) -> windows.Window:
    """Return the window from the month's beginning to now."""
    return windows.Window(
        windows.of_month(f"{now.astimezone(tz):%Y-%m}", tz).start_us, windows.to_us(now) + 1
    )
