"""forebay sql: a query over the recorded tables, or the tables as Parquet. For who may read the state folder.

It needs no service: the books can be read while everything is down.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any, TextIO

import duckdb

from accounting import layout, manifest, postings, public, settings, windows
from scheduler.contracts import command_line, times
from scheduler.contracts.command_line import CommandError


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options; `run` takes what was parsed."""
    parser.add_argument(
        "query", nargs="?", default="", help="over usage, gpu_minutes, rates, bill; see docs/sql.md"
    )
    parser.add_argument(
        "-S", "--starttime", metavar="TIME", default="", help="from (this month's begin)"
    )
    parser.add_argument(
        "-E", "--endtime", metavar="TIME", default="", help="up to, not including (now)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON list of rows")
    parser.add_argument("--csv", action="store_true", help="CSV with a header")
    parser.add_argument("--export", metavar="DIR", type=Path, help="all four tables as Parquet")


def run(
    asked: argparse.Namespace,
    *,
    state_dir: Path,
    table: settings.Accounting,
    streams: tuple[TextIO, TextIO],
    now: datetime.datetime,
    tz: datetime.tzinfo,
) -> int:
    """Run the query; the exit code is 1 if something could not be read.

    Raises:
        CommandError: a time or the query can't be understood, or the books can't be read.
    """
    out, err = streams
    if bool(asked.query) == (asked.export is not None):
        raise CommandError("give a query, or --export DIR")
    if asked.json and asked.csv:
        raise CommandError("--json and --csv exclude each other: give one")
    if not state_dir.is_dir():
        raise CommandError(f"{state_dir}: no such folder: set [forebay] state_dir")
    if not any((state_dir / name).is_dir() for name in ("parquet", "spool")):
        print(f"{state_dir}: nothing is recorded there yet (--config FILE?)", file=err)
    window = _window(asked, now, tz)
    try:
        with public.opened(state_dir, table, window) as tables:
            if asked.export is not None:
                for path in public.export(tables, asked.export):
                    print(path, file=out)
            else:
                _answer(tables, asked, out)
            for problem in tables.problems:
                command_line.say(f"forebay sql: warning: {problem}", err)
            return int(bool(tables.problems))
    except duckdb.Error as error:
        raise CommandError(f"{str(error).splitlines()[0]}") from error
    except (manifest.ManifestDamaged, postings.PostingsDamaged) as error:
        raise CommandError(f"{error}") from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error


def _window(
    asked: argparse.Namespace, now: datetime.datetime, tz: datetime.tzinfo
) -> windows.Window:
    try:
        known = public.this_month(now, tz)
        start, end = known.start_us, known.end_us
        if asked.starttime:
            start = windows.to_us(times.point(asked.starttime, now=now, tz=tz, past=True))
        if asked.endtime:
            end = windows.to_us(times.point(asked.endtime, now=now, tz=tz, past=True))
    except times.TimeError as error:
        raise CommandError(f"{error}") from error
    if not 0 <= start < end:
        raise CommandError("the end time is not after the start time: give -S and -E in order")
    return windows.Window(start, end)


def _answer(tables: public.Tables, asked: argparse.Namespace, out: TextIO) -> None:
    names, rows = public.query(tables, asked.query)
    if asked.json:
        if twice := [name for name in names if names.count(name) > 1]:
            raise CommandError(
                f"{layout.escaped(twice[0], '')}: two columns have this name: tell them apart with AS"
            )
        document = [dict(zip(names, row, strict=True)) for row in rows]
        print(json.dumps(document, indent=2, default=str), file=out)
    elif asked.csv:
        layout.csv_lines(names, rows, out)
    else:
        command_line.table(
            [_shown(name) for name in names], [[_shown(cell) for cell in row] for row in rows], out
        )


def _shown(cell: Any) -> str:
    """Return a cell as text in which a caller's words can't steer the terminal."""
    return layout.escaped("" if cell is None else str(cell), "")
