"""What facct and freport share: their options, the call to the usage API, and how rows are put out."""

import argparse
import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from accounting import layout, lists, windows
from scheduler.contracts import command_line, ports, times
from scheduler.contracts.command_line import CommandError

BASE = "/forebay/v1/usage"

_PARTING = re.compile(r"[^\\\x00-\x08\x0a-\x1f\x7f-\x9f]*")

Place = tuple[Mapping[str, str], datetime.datetime, datetime.tzinfo]


def roomy(prog: str) -> argparse.HelpFormatter:
    """Return a help formatter that keeps each option on one line."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=100)


def output_options(parser: argparse.ArgumentParser) -> None:
    """Declare how rows are put out."""
    parser.add_argument("-n", "--noheader", action="store_true", help="no header")
    parser.add_argument(
        "-P", "--parsable2", action="store_true", help="fields parted by |, escaped"
    )
    parser.add_argument(
        "-p", "--parsable", action="store_true", help="the same, with a | at the end"
    )
    parser.add_argument("--delimiter", metavar="TEXT", help="instead of | (with -P or -p)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--csv", action="store_true", help="CSV with a header")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="write the rows to FILE")


def window_options(parser: argparse.ArgumentParser, *, start: str, end: str) -> None:
    """Declare which rows are wanted; ``start`` and ``end`` say what holds where nothing is given."""
    parser.add_argument(
        "-S", "--starttime", metavar="TIME", help=f"from: now-7days, 2026-11-01 … ({start})"
    )
    parser.add_argument("-E", "--endtime", metavar="TIME", help=f"up to, not including ({end})")
    parser.add_argument("-u", "--user", metavar="LIST", default="", help="of these users")
    parser.add_argument("-A", "--accounts", metavar="LIST", default="", help="of these teams")
    parser.add_argument("-M", "--clusters", metavar="LIST", default="", help="of these clusters")
    parser.add_argument("--model", metavar="LIST", default="", help="of these models")
    parser.add_argument("--tier", metavar="LIST", default="", help="of these tiers")


def ask(
    api: ports.Api, path: str, options: argparse.Namespace, window: windows.Window, **more: str
) -> dict[str, Any]:
    """Ask the usage API for rows of the window that the options' filters let through.

    Raises:
        CommandError: the gateway does not answer, or not with rows.
    """
    params = {
        "start_us": str(window.start_us),
        "end_us": str(window.end_us),
        "team": options.accounts,
        "user": options.user,
        "model": options.model,
        "tier": options.tier,
        "cluster": options.clusters,
        **more,
    }
    kept = {name: value for name, value in params.items() if value}
    answer = api.call("GET", f"{BASE}/{path}", params=kept)
    if not isinstance(answer.json, dict) or "rows" not in answer.json:
        raise CommandError("the gateway's answer is no usage report: is it another release?")
    return dict(answer.json)


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma list; raises `CommandError` where it can't be read."""
    try:
        return lists.read(text)
    except ValueError as error:
        raise CommandError(str(error)) from error


def style(options: argparse.Namespace) -> layout.Style:
    """Return the style of the output options; raises `CommandError` where they exclude each other."""
    parsable = options.parsable or options.parsable2
    if sum(map(bool, (parsable, options.json, options.csv, options.parquet))) > 1:
        raise CommandError("-P or -p, --json, --csv and --parquet exclude each other: give one")
    if options.delimiter is not None and (not parsable or not options.delimiter):
        raise CommandError("--delimiter needs -P or -p, and at least one character")
    delimiter = (options.delimiter or "|") if parsable else ""
    if delimiter[:1].isalnum() or not _PARTING.fullmatch(delimiter):
        raise CommandError(
            f"--delimiter {delimiter!r}: fields could not be told apart: begin with a sign or a TAB, "
            "without a backslash or a line break"
        )
    return layout.Style(delimiter, bool(options.parsable), not options.noheader)


def emit(
    columns: Sequence[layout.Column],
    rows: Sequence[layout.Row],
    tz: datetime.tzinfo,
    how: tuple[argparse.Namespace, layout.Style, Mapping[str, Any]],
    out: TextIO,
    known: Mapping[str, type],
) -> None:
    """Put rows out as the options say.

    Args:
        columns: of tables, parsable lines and CSV.
        rows: as the usage API gave them.
        tz: of times.
        how: the options, their style, and what ``--json`` holds beside the rows.
        out: where to.
        known: what ``--parquet`` has columns for.
    """
    options, chosen, document = how
    if options.json:
        command_line.print_json({**document, "rows": list(rows)}, out)
    elif options.csv:
        layout.write_csv(columns, rows, tz, out, header=chosen.header)
    elif options.parquet:
        layout.write_parquet(rows, options.parquet, known)
    else:
        layout.print_rows(columns, rows, tz, chosen, out)


def about(window: windows.Window, tz: datetime.tzinfo) -> dict[str, Any]:
    """Return what every JSON document says of its window."""
    return {"window": {"start_us": window.start_us, "end_us": window.end_us, "zone": str(tz)}}


def window_text(window: windows.Window, tz: datetime.tzinfo) -> str:
    """Return the line that names a report's window."""
    start = times.print_point(window.start_us, tz) if window.start_us else "the beginning"
    known = window.end_us < windows.END_US
    end = times.print_point(window.end_us, tz) if known else "the end"
    return f"Window: {start} - {end} ({tz})"


def say_window(window: windows.Window, tz: datetime.tzinfo, out: TextIO) -> None:
    """Print the window, on a terminal only."""
    if out.isatty():
        print(window_text(window, tz), file=out)


def complain(prog: str, answers: Sequence[dict[str, Any]], err: TextIO) -> int:
    """Say on stderr what is missing from the answer; its exit code is 1 then."""
    lines = list(dict.fromkeys(line for answer in answers for line in answer.get("problems", ())))
    if any(answer.get("truncated") for answer in answers):
        lines.append("there are more rows than one answer holds: narrow the window with -S and -E")
    for line in lines:
        command_line.say(f"{prog}: warning: {line}", err)
    return int(bool(lines))
