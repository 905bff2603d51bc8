"""facct: sacct's manners over the usage API. A row is a batch job, one of its lines, a request or a lease."""

import argparse
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from accounting import asking, fields, layout, lists, named, windows
from scheduler.contracts import command_line, ports
from scheduler.contracts.command_line import CommandError

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


def parser() -> command_line.Parser:
    """Return facct's parser."""
    made = command_line.Parser(
        prog="facct",
        usage="facct [options]",
        formatter_class=asking.roomy,
        description="Show what requests, batch jobs and leases used.",
        epilog="examples:\n  facct -S now-1hour -X\n  facct -j 12 -o jobid%-30,state,reason\n"
        "  facct --leases -P",
    )
    asking.window_options(made, start="today; -j: all time", end="now")
    made.add_argument("-j", "--jobs", metavar="LIST", help="batch jobs, job.line, request ids")
    made.add_argument("-s", "--state", metavar="LIST", help="in these states (CD, F, PR …)")
    made.add_argument("-X", "--allocations", action="store_true", help="no lines of batch jobs")
    made.add_argument("-D", "--duplicates", action="store_true", help="every attempt as a row")
    made.add_argument("-T", "--truncate", action="store_true", help="clip times to the window")
    made.add_argument("--leases", action="store_true", help="leases instead, with GPU-seconds")
    made.add_argument("-o", "--format", metavar="FIELDS", help="comma list, field%%width")
    made.add_argument("--units", metavar="KMGT", default="", help="tokens in K, M, G or T")
    made.add_argument("--noconvert", action="store_true", help="tokens as whole numbers (default)")
    made.add_argument("--helpformat", action="store_true", help="list the fields")
    asking.output_options(made)
    return made


def _facct(
    argv: Sequence[str], api: ports.Api, out: TextIO, err: TextIO, place: asking.Place
) -> int:
    env, now, tz = place
    options = parser().parse_args(list(argv))
    if options.helpformat:
        layout.print_fields(fields.FIELDS, out)
        return 0
    style = asking.style(options)
    default = fields.LEASES if options.leases else fields.DEFAULT
    columns = layout.choose(options.format or env.get("FACCT_FORMAT") or default, fields.FIELDS)
    columns = fields.in_units(columns, "" if options.noconvert else options.units)
    window = windows.of_facct(
        options.starttime, options.endtime, now=now, tz=tz, named=options.jobs is not None
    )
    wanted = fields.states(options.state) if options.state is not None else None
    if options.leases and (options.state is not None or options.duplicates or options.allocations):
        raise CommandError("-s, -D and -X do not go with --leases: leave them out")
    gpu = any(column.name == "GPUSeconds" for column in columns)
    answers = [_ask(api, path, options, window, gpu=gpu) for path in _paths(options)]
    if not options.leases:
        _name_jobs(api, answers[0])
    rows = _joined(answers, options, wanted)
    unknown = named.complete(api, options, window, answers, rows)
    if options.truncate:
        rows = [fields.truncated(row, window) for row in rows]
    if not style.delimiter and not (options.json or options.csv or options.parquet):
        asking.say_window(window, tz, out)
    known = fields.stored(leases=options.leases)
    asking.emit(columns, rows, tz, (options, style, asking.about(window, tz)), out, known)
    code = asking.complain("facct", answers, err)
    named.tell(unknown, options)
    return code


def _paths(options: argparse.Namespace) -> list[str]:
    return ["leases"] if options.leases else ["jobs", "requests"]


def _ask(
    api: ports.Api, path: str, options: argparse.Namespace, window: windows.Window, *, gpu: bool
) -> dict[str, Any]:
    params: dict[str, str] = {}
    if options.jobs is not None:
        names = [named.job_and_line(item)[0] for item in asking.names(options.jobs) if item.strip()]
        if not names:
            raise CommandError("-j needs at least one id")
        params["job"] = lists.write(names)
    if path == "requests":
        params["attempts"] = "1" if options.duplicates else "0"
        params["lines"] = "0" if options.allocations else "1"
        if (
            options.state is not None
        ):  # a state that no outcome has (PD) is left to the rows' own filter
            params["outcome"] = ",".join(fields.outcomes(fields.states(options.state)))
    if path != "leases" and gpu:
        params["gpu"] = "1"
    return asking.ask(api, path, options, window, **params)


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
        row["lines_total"] = job["lines"]["total"] if job else None


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
    lines = [named.job_and_line(item) for item in asking.names(options.jobs or "")]
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
