"""facct and freport: sacct's and sreport's manners over the usage API."""

import argparse
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from accounting import fields, freport_rows, layout, windows
from scheduler.contracts import command_line, ports, times
from scheduler.contracts.command_line import CommandError

_BASE = "/forebay/v1/usage"
_IDS_AT_ONCE = 200  # an URL's length


def facct(
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    env: Mapping[str, str],
    now: datetime.datetime,
    tz: datetime.tzinfo,
) -> int:
    """Run facct; returns its exit code (1 also when rows could not be read or were left out)."""
    return command_line.run("facct", lambda: _facct(argv, api, out, err, (env, now, tz)), err=err)


def freport(
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    env: Mapping[str, str],
    now: datetime.datetime,
    tz: datetime.tzinfo,
) -> int:
    """Run freport; returns its exit code (1 also when ``reconcile`` finds leases that disagree)."""
    return command_line.run(
        "freport", lambda: _freport(argv, api, out, err, (env, now, tz)), err=err
    )


_Place = tuple[Mapping[str, str], datetime.datetime, datetime.tzinfo]


def _output_options(parser: argparse.ArgumentParser) -> None:
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


def _window_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-S", "--starttime", metavar="TIME", help="from: now-7days, 2026-11-01 …")
    parser.add_argument("-E", "--endtime", metavar="TIME", help="up to, not including")
    parser.add_argument("-u", "--user", metavar="LIST", default="", help="of these users")
    parser.add_argument("-A", "--accounts", metavar="LIST", default="", help="of these teams")
    parser.add_argument("--model", metavar="LIST", default="", help="of these models")
    parser.add_argument("--tier", metavar="LIST", default="", help="of these tiers")


def _facct_parser() -> command_line.Parser:
    parser = command_line.Parser(
        prog="facct",
        description="Show what requests, batch jobs and leases used.",
        epilog="examples:\n  facct -S now-1hour -X\n  facct -j 12 -o jobid%-30,state,reason\n"
        "  facct --leases -P",
    )
    _window_options(parser)
    parser.add_argument("-j", "--jobs", metavar="LIST", help="batch jobs, job.line, request ids")
    parser.add_argument("-s", "--state", metavar="LIST", help="in these states (CD, F, PR …)")
    parser.add_argument("-X", "--allocations", action="store_true", help="no lines of batch jobs")
    parser.add_argument("-D", "--duplicates", action="store_true", help="every attempt as a row")
    parser.add_argument("--leases", action="store_true", help="leases instead, with GPU-seconds")
    parser.add_argument("-o", "--format", metavar="FIELDS", help="comma list, field%%width")
    parser.add_argument("--helpformat", action="store_true", help="list the fields")
    _output_options(parser)
    return parser


def _facct(argv: Sequence[str], api: ports.Api, out: TextIO, err: TextIO, place: _Place) -> int:
    env, now, tz = place
    options = _facct_parser().parse_args(list(argv))
    if options.helpformat:
        layout.print_fields(fields.FIELDS, out)
        return 0
    style = _style(options)
    default = fields.LEASES if options.leases else fields.DEFAULT
    columns = layout.choose(options.format or env.get("FACCT_FORMAT") or default, fields.FIELDS)
    window = windows.of_facct(
        options.starttime, options.endtime, now=now, tz=tz, named=options.jobs is not None
    )
    wanted = fields.states(options.state) if options.state is not None else None
    if options.leases and (options.state is not None or options.duplicates or options.allocations):
        raise CommandError("-s, -D and -X do not go with --leases: leave them out")
    answers = [_ask(api, path, options, window) for path in _paths(options)]
    if not options.leases:
        _name_jobs(api, answers[0])
    rows = _joined(answers, options, wanted)
    if not style.delimiter and not (options.json or options.csv or options.parquet):
        _say_window(window, tz, out)
    _emit(columns, rows, tz, (options, style, window), out)
    return _complain("facct", answers, err)


def _paths(options: argparse.Namespace) -> list[str]:
    return ["leases"] if options.leases else ["jobs", "requests"]


def _ask(
    api: ports.Api, path: str, options: argparse.Namespace, window: windows.Window, **more: str
) -> dict[str, Any]:
    params = {
        "start_us": str(window.start_us),
        "end_us": str(window.end_us),
        "team": options.accounts,
        "user": options.user,
        "model": options.model,
        "tier": options.tier,
        **more,
    }
    if path in {"jobs", "requests", "leases"} and options.jobs is not None:
        names = [_job_and_line(item)[0] for item in options.jobs.split(",") if item.strip()]
        if not names:
            raise CommandError("-j needs at least one id")
        params["job"] = ",".join(names)
    if path == "requests":
        params["attempts"] = "1" if options.duplicates else "0"
        params["lines"] = "0" if options.allocations else "1"
        if (
            options.state is not None
        ):  # a state that no outcome has (PD) is left to the rows' own filter
            params["outcome"] = ",".join(fields.outcomes(fields.states(options.state)))
    answer = api.call(
        "GET", f"{_BASE}/{path}", params={name: value for name, value in params.items() if value}
    )
    if not isinstance(answer.json, dict) or "rows" not in answer.json:
        raise CommandError("the gateway's answer is no usage report: is it another release?")
    return dict(answer.json)


def _name_jobs(api: ports.Api, answer: dict[str, Any]) -> None:
    """Add to each batch job what only the batch runner knows: its state, name, and how many lines."""
    rows = answer["rows"]
    known: dict[int, dict[str, Any]] = {}
    for first in range(0, len(rows), _IDS_AT_ONCE):
        numbers = [str(row["batch_job_id"]) for row in rows[first : first + _IDS_AT_ONCE]]
        try:
            told = api.call("GET", "/forebay/v1/jobs", params={"ids": ",".join(numbers)}).json
        except CommandError as error:
            answer["problems"] = [*answer["problems"], f"states of batch jobs: {error.message}"]
            break
        known |= {job["job_id"]: job for job in told["jobs"]}
    for row in rows:
        job = known.get(row["batch_job_id"], {})
        row["state"] = job.get("state", "Unknown")
        row["job_name"] = job.get("name", "")
        row["reason"] = job.get("reason", "")
        row["lines_total"] = job["lines"]["total"] if job else "Unknown"


def _job_and_line(item: str) -> tuple[str, str]:
    """Split ``12.line-7``; a request id has no dot."""
    job, dot, line = item.strip().partition(".")
    return (job, line) if dot and job.isdigit() else (item.strip(), "")


def _joined(
    answers: Sequence[dict[str, Any]],
    options: argparse.Namespace,
    wanted: frozenset[str] | None,
) -> list[dict[str, Any]]:
    """Put rows in order: by arrival, a job's lines after it."""
    if options.leases:
        rows = [
            {**row, "record": "lease", "started_us": row["first_us"], "ended_us": row["last_us"]}
            for row in answers[0]["rows"]
        ]
        return sorted(rows, key=lambda row: (row["started_us"], row["lease_id"]))
    jobs, requests = answers[0]["rows"], answers[1]["rows"]
    rows = [{**row, "record": "job"} for row in jobs]
    rows += [{**row, "record": "line" if row["batch_job_id"] else "request"} for row in requests]
    lines = [_job_and_line(item) for item in (options.jobs or "").split(",")]
    if any(line for _, line in lines):
        rows = [row for row in rows if _named(row, lines)]
    if wanted is not None:
        rows = [row for row in rows if fields.state(row) in wanted]
    begun = {row["batch_job_id"]: row["arrived_us"] for row in jobs}
    return sorted(
        rows,
        key=lambda row: (
            begun.get(row["batch_job_id"], row["arrived_us"]),
            row["batch_job_id"],
            row["record"] != "job",
            row["arrived_us"],
            row.get("request_id", ""),
            row.get("attempt", 0),
        ),
    )


def _named(row: Mapping[str, Any], lines: Sequence[tuple[str, str]]) -> bool:
    job = str(row["batch_job_id"])
    if row["record"] == "line":
        return (job, row["custom_id"]) in lines or (job, "") in lines
    return (job if row["record"] == "job" else row["request_id"], "") in lines


def _freport_parser() -> command_line.Parser:
    parser = command_line.Parser(
        prog="freport",
        description="Tokens and GPU time by cluster, team, user, model or tier; or 'reconcile':\n"
        "every lease in Forebay's and in Slurm's books. Yesterday, unless -S says otherwise.",
        epilog="examples:\n  freport team\n  freport model by hour -S today -t Hours\n"
        "  freport user by month --month 2026-11 --csv\n  freport reconcile -S now-1day",
    )
    parser.add_argument("report", choices=[*freport_rows.REPORTS, "reconcile"])
    parser.add_argument("words", nargs="*", default=[], metavar="by UNIT",
                        help="hour, day (default) or month")  # fmt: skip
    _window_options(parser)
    parser.add_argument("--month", metavar="YYYY-MM", help="that month, instead of -S and -E")
    parser.add_argument("-t", dest="unit", metavar="UNIT", default="Seconds",
                        help="GPU time in Seconds, Minutes, Hours or Percent")  # fmt: skip
    parser.add_argument("-T", dest="measures", metavar="LIST", default="gpu,tokens",
                        help="gpu, tokens")  # fmt: skip
    _output_options(parser)
    return parser


def _freport(argv: Sequence[str], api: ports.Api, out: TextIO, err: TextIO, place: _Place) -> int:
    _, now, tz = place
    options = _freport_parser().parse_args(list(argv))
    period = freport_rows.period(options.words)
    unit = freport_rows.unit(options.unit)
    measures = freport_rows.measures(options.measures)
    style = _style(options)
    if options.month and (options.starttime or options.endtime):
        raise CommandError("--month and -S or -E exclude each other: give one")
    if options.month:
        window = windows.of_month(options.month, tz)
    else:
        window = windows.of_freport(options.starttime, options.endtime, now=now, tz=tz)
    if options.report == "reconcile":
        answer = _ask(api, "reconcile", options, window)
        columns, rows = freport_rows.RECONCILE, answer["rows"]
        title = freport_rows.RECONCILE_TITLE
    else:
        more = {"by": options.report, "unit": period, "tz": windows.zone_name(tz, now)}
        answer = _ask(api, "rollup", options, window, **more)
        rows = freport_rows.with_percent(answer["rows"], unit)
        columns = freport_rows.columns(options.report, unit, measures)
        title = f"{options.report.capitalize()} usage by {period}, GPU time in {unit}"
    plain = not (style.delimiter or options.json or options.csv or options.parquet)
    if plain and style.header:
        rule = "-" * 80
        print(f"{rule}\n{title}\n{_window_text(window, tz)}\n{rule}", file=out)
    _emit(columns, rows, tz, (options, style, window), out)
    bad = any(row.get("agrees") is False for row in rows)
    return max(_complain("freport", [answer], err), int(bad))


def _style(options: argparse.Namespace) -> layout.Style:
    parsable = options.parsable or options.parsable2
    if sum(map(bool, (parsable, options.json, options.csv, options.parquet))) > 1:
        raise CommandError("-P or -p, --json, --csv and --parquet exclude each other: give one")
    if options.delimiter is not None and (not parsable or not options.delimiter):
        raise CommandError("--delimiter needs -P or -p, and at least one character")
    delimiter = (options.delimiter or "|") if parsable else ""
    return layout.Style(delimiter, bool(options.parsable), not options.noheader)


def _emit(
    columns: Sequence[layout.Column],
    rows: Sequence[layout.Row],
    tz: datetime.tzinfo,
    how: tuple[argparse.Namespace, layout.Style, windows.Window],
    out: TextIO,
) -> None:
    options, style, window = how
    if options.json:
        span = {"start_us": window.start_us, "end_us": window.end_us}
        command_line.print_json({"window": span, "rows": list(rows)}, out)
    elif options.csv:
        layout.write_csv(columns, rows, tz, out)
    elif options.parquet:
        layout.write_parquet(rows, options.parquet)
    else:
        layout.print_rows(columns, rows, tz, style, out)


def _window_text(window: windows.Window, tz: datetime.tzinfo) -> str:
    start = times.print_point(window.start_us, tz) if window.start_us else "the beginning"
    return f"Window: {start} - {times.print_point(window.end_us, tz)} ({tz})"


def _say_window(window: windows.Window, tz: datetime.tzinfo, out: TextIO) -> None:
    if out.isatty():
        print(_window_text(window, tz), file=out)


def _complain(prog: str, answers: Sequence[dict[str, Any]], err: TextIO) -> int:
    """Say on stderr what is missing from the answer; its exit code is 1 then."""
    lines = list(dict.fromkeys(line for answer in answers for line in answer.get("problems", ())))
    if any(answer.get("truncated") for answer in answers):
        lines.append("there are more rows than one answer holds: narrow the window with -S and -E")
    for line in lines:
        print(f"{prog}: warning: {line}", file=err)
    return int(bool(lines))
