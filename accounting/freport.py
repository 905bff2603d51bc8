"""freport: sreport's manners over the usage API, charts and files to send."""

import argparse
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from accounting import (
    asking,
    freport_rows,
    layout,
    lists,
    money,
    windows,
)
from accounting import bill as bills
from scheduler.contracts import command_line, ports, stored
from scheduler.contracts.command_line import CommandError


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
    place = (env, now, tz)
    return command_line.run("freport", lambda: _freport(argv, api, out, err, place), err=err)


def parser() -> command_line.Parser:
    """Return freport's parser."""
    made = command_line.Parser(
        prog="freport",
        usage="freport REPORT [by UNIT] [options]",
        formatter_class=asking.roomy,
        description="Tokens, GPU time and cost by cluster, team, user, model, tier or endpoint; 'bill': a\n"
        "month's bill, line by line; 'waste': GPU time that answered nobody, by cause; or 'reconcile':\n"
        "every lease in Forebay's and in Slurm's books.\n"
        "Yesterday, unless -S says otherwise.",
        epilog="examples:\n  freport team\n  freport model by hour -S today -t Hours -T gpu,cost --chart\n"
        "  freport bill --month 2026-11 -A physics\n"
        "  freport team --month 2026-11 -A physics --html physics.html\n  freport reconcile -S today\n"
        "  freport reconcile by account -S 2026-11-01 -E 2026-12-01\n"
        "  freport waste by hour -S today -t Hours",
    )
    made.add_argument(
        "report",
        choices=[*freport_rows.REPORTS, "bill", "waste", "reconcile"],
        metavar="REPORT",
        help="see above",
    )
    made.add_argument("words", nargs="*", default=[], metavar="by UNIT",
                        help="hour, day (default) or month")  # fmt: skip
    asking.window_options(
        made, start="yesterday's midnight", end="today's midnight; now if -S is of today"
    )
    made.add_argument(
        "--month", metavar="YYYY-MM", help="that month, instead of -S and -E (of a bill: this one)"
    )
    made.add_argument("-t", dest="unit", metavar="UNIT", default="Seconds",
                        help="GPU time in Seconds, Minutes, Hours or Percent")  # fmt: skip
    made.add_argument("-T", dest="measures", metavar="LIST", default="gpu,tokens",
                        help="of gpu, tokens, cost, efficiency")  # fmt: skip
    made.add_argument("-o", "--format", metavar="FIELDS", help="comma list, field%%width")
    made.add_argument("--chart", action="store_true", help="bars of the first of -T, on a terminal")
    made.add_argument(
        "--idle", choices=["none", "use"], default="none",
        help="use: shared idle GPU time is added to who used GPUs then, by use",
    )  # fmt: skip
    made.add_argument(
        "--png", metavar="FILE", type=Path, help="a chart of the first of -T over time"
    )
    made.add_argument(
        "--html", metavar="FILE", type=Path, help="team and --month: a statement to send"
    )
    asking.output_options(made)
    return made


def _freport(
    argv: Sequence[str], api: ports.Api, out: TextIO, err: TextIO, place: asking.Place
) -> int:
    options = parser().parse_intermixed_args(list(argv))  # `team --month 2026-11 by day` too
    style = asking.style(options)
    _check(options, style, out)
    if options.html is not None:
        return _statement(options, api, out, err, place[1])
    if options.report == "bill":
        return _bill(options, style, api, (out, err), place)
    if options.report == "reconcile":
        return _reconcile(options, style, api, (out, err), place)
    if options.report == "waste":
        return _waste(options, style, api, (out, err), place)
    return _usage(options, style, api, (out, err), place)


def _check(options: argparse.Namespace, style: layout.Style, out: TextIO) -> None:
    plain = not (style.delimiter or options.json or options.csv or options.parquet)
    files = [name for name in ("chart", "png", "html") if getattr(options, name)]
    if options.month and (options.starttime or options.endtime):
        raise CommandError("--month and -S or -E exclude each other: give one")
    if len(files) > 1 or (files and not plain):
        raise CommandError(f"--{files[0]} goes with no other output: ask twice")
    if files and options.report in {"bill", "waste", "reconcile"}:
        raise CommandError(f"--{files[0]} draws no {options.report}: take another report")
    if options.chart and not out.isatty():
        raise CommandError("--chart draws on a terminal only: use --png FILE")
    if options.html and (options.report != "team" or not options.month):
        raise CommandError("--html is for a team's month: freport team --month 2026-11 --html FILE")


_Streams = tuple[TextIO, TextIO]


def _window(options: argparse.Namespace, place: asking.Place) -> windows.Window:
    _, now, tz = place
    if options.month:
        return windows.of_month(options.month, tz)
    return windows.of_freport(options.starttime, options.endtime, now=now, tz=tz)


def _span(options: argparse.Namespace, window: windows.Window, place: asking.Place) -> str:
    """Return the line that names the window, and that today is not in it where nobody said so."""
    _, now, tz = place
    text = asking.window_text(window, tz)
    if options.starttime and not options.endtime and window.end_us <= windows.to_us(now):
        text += "; today is not in it: -E now adds it"
    return text


def _usage(
    options: argparse.Namespace,
    style: layout.Style,
    api: ports.Api,
    streams: _Streams,
    place: asking.Place,
) -> int:
    (out, err), (env, now, tz) = streams, place
    period = freport_rows.period(options.words)
    unit = freport_rows.unit(options.unit)
    shown = freport_rows.measures(options.measures)
    known = freport_rows.columns(
        options.report, unit, freport_rows.MEASURES if options.format else shown
    )
    columns = layout.choose(options.format, known) if options.format else known
    window = _window(options, place)
    more = {"by": options.report, "unit": period, "tz": windows.zone_name(tz, now)}
    more["idle"] = options.idle
    answer = asking.ask(api, "rollup", options, window, **more)
    rows = freport_rows.with_percent(answer["rows"], unit, whole=answer.get("whole", False))
    title = f"{options.report.capitalize()} usage by {period}, GPU time in {unit}"
    if options.idle == "use":
        title += " with idle time shared out by use"
    if {"cost", "efficiency"} & set(shown):
        title += f", cost in {answer['currency']}"
    drawn = rows  # only GPU time has parts that are nobody's
    if shown[0] != "gpu":
        drawn = [row for row in rows if row["what"] == "used"]
    if "gpu" not in shown and not (options.format or options.json or options.parquet):
        rows = [row for row in rows if row["what"] == "used"]  # the others would be empty lines
    if options.png is not None:
        _draw(options, drawn, (shown[0], answer["currency"], period), window, tz)
        return asking.complain("freport", [answer], err)
    if not _quiet(options, style):
        _head(title, _span(options, window, place), out)
    if options.chart:
        from accounting import bars

        wide = command_line.colour(out) and "NO_COLOR" not in env
        bars.draw(drawn, options.report, (shown[0], answer["currency"]), out, colour=wide)
    else:
        about = {**asking.about(window, tz), "currency": answer["currency"]}
        stored = freport_rows.stored(options.report)
        asking.emit(columns, rows, tz, (options, style, about), out, stored)
    return asking.complain("freport", [answer], err)


def _draw(
    options: argparse.Namespace,
    rows: Sequence[layout.Row],
    what: tuple[str, str, str],
    window: windows.Window,
    tz: datetime.tzinfo,
) -> None:
    from accounting import charts

    measure, currency, period = what
    series = charts.stacked(
        rows,
        lambda row: freport_rows.group(row, options.report),
        lambda row: freport_rows.value(row, measure),
        (period, tz),
    )
    title = f"{options.report.capitalize()} usage by {period}"
    picture = charts.png(
        series, title, asking.window_text(window, tz), freport_rows.measured(measure, currency)
    )
    _save(options.png, picture)


def _bill(
    options: argparse.Namespace,
    style: layout.Style,
    api: ports.Api,
    streams: _Streams,
    place: asking.Place,
) -> int:
    (out, err), (_, now, tz) = streams, place
    if options.words or options.starttime or options.endtime:
        raise CommandError("a bill is of one month: freport bill --month 2026-11")
    columns = freport_rows.BILL
    if options.format:
        columns = layout.choose(options.format, columns)
    month = options.month or f"{now.astimezone(tz):%Y-%m}"
    answer = asking.ask(api, "bill", options, windows.of_month(month, datetime.UTC), month=month)
    if not _quiet(options, style):
        state = "closed" if answer["closed_us"] else "open, as of now"
        span = stored.read(windows.Window, answer["window"])
        zone = windows.zone(answer["zone"])
        _head(
            f"Bill of {month} ({state}), in {answer['currency']}; "
            "prices are for 1000 tokens or a GPU-hour",
            asking.window_text(span, zone),
            out,
        )
    about = {
        name: answer[name] for name in ("month", "window", "zone", "currency", "closed_us", "total")
    }
    known = layout.types_of(bills.Line)
    asking.emit(columns, answer["rows"], tz, (options, style, about), out, known)
    if not _quiet(options, style):
        for what, owed in freport_rows.totals(answer["rows"]):
            name = layout.escaped(what, "")
            print(f"{name}: {money.show(owed)} {answer['currency']}", file=out)
    return asking.complain("freport", [answer], err)


def _reconcile(
    options: argparse.Namespace,
    style: layout.Style,
    api: ports.Api,
    streams: _Streams,
    place: asking.Place,
) -> int:
    (out, err), (_, _, tz) = streams, place
    words = [word.lower() for word in options.words if word.lower() != "by"]
    if words not in ([], ["lease"], ["account"]):
        raise CommandError(f"what is {' '.join(options.words)!r}? Write: by lease or by account")
    by = (*words, "lease")[0]
    columns, title = freport_rows.RECONCILE, freport_rows.RECONCILE_TITLE
    if by == "account":
        columns, title = freport_rows.ACCOUNTS, freport_rows.ACCOUNTS_TITLE
    if options.format:
        columns = layout.choose(options.format, columns)
    window = _window(options, place)
    answer = asking.ask(api, "reconcile", options, window, by=by)
    window = stored.read(windows.Window, answer["window"])
    if not _quiet(options, style):
        _head(title, _span(options, window, place), out)
    how = (options, style, asking.about(window, tz))
    asking.emit(columns, answer["rows"], tz, how, out, freport_rows.compared(by))
    bad = any(row.get("agrees") is False for row in answer["rows"])
    return max(asking.complain("freport", [answer], err), int(bad))


def _waste(
    options: argparse.Namespace,
    style: layout.Style,
    api: ports.Api,
    streams: _Streams,
    place: asking.Place,
) -> int:
    (out, err), (_, now, tz) = streams, place
    period, unit = freport_rows.period(options.words), freport_rows.unit(options.unit)
    columns = freport_rows.waste(unit)
    if options.format:
        columns = layout.choose(options.format, columns)
    window = _window(options, place)
    answer = asking.ask(api, "waste", options, window, unit=period, tz=windows.zone_name(tz, now))
    if not _quiet(options, style):
        title = f"GPU time that answered nobody by {period} and cause, in {unit}"
        _head(title, _span(options, window, place), out)
    how = (options, style, asking.about(window, tz))
    asking.emit(columns, answer["rows"], tz, how, out, freport_rows.WASTED)
    return asking.complain("freport", [answer], err)


def _statement(
    options: argparse.Namespace,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    now: datetime.datetime,
) -> int:
    from accounting import statement

    month = options.month
    unfiltered = argparse.Namespace(
        **{**vars(options), "user": "", "model": "", "tier": "", "clusters": ""}
    )
    if any((options.user, options.model, options.tier, options.clusters)):
        raise CommandError("a statement holds all of a team's month: only -A goes with --html")
    bill = asking.ask(api, "bill", unfiltered, windows.of_month(month, datetime.UTC), month=month)
    span = stored.read(windows.Window, bill["window"])
    answers, known = [bill], {line["team"] for line in bill["rows"]}

    def ask(team: str, by: str, unit: str) -> list[dict[str, Any]]:
        only = argparse.Namespace(**{**vars(unfiltered), "accounts": lists.write([team])})
        more = {"by": by, "unit": unit, "tz": bill["zone"]}
        answers.append(asking.ask(api, "rollup", only, span, **more))
        rows = [row for row in answers[-1]["rows"] if row["what"] == "used"]
        known.update(team for _ in rows)
        return rows

    rates = api.call("GET", "/admin/rates").json["rates"]
    teams = sorted({line["team"] for line in bill["rows"]} | set(asking.names(options.accounts)))
    if not teams:
        raise CommandError(
            f"nobody that you may see used anything in {month}: there is no statement"
        )
    text = statement.render(bill, teams, ask, rates, now)
    code = asking.complain("freport", answers, err)
    if code:
        print("freport: warning: the statement is not complete: do not send it", file=err)
    _save(options.html, text.encode())
    for team in (each for each in teams if each not in known):
        text = asking.window_text(span, windows.zone(bill["zone"]))
        command_line.say(f"freport: {team}: nothing is recorded; {text}", err)
    return code


def _save(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}: choose another file") from error


def _quiet(options: argparse.Namespace, style: layout.Style) -> bool:
    plain = not (style.delimiter or options.json or options.csv or options.parquet)
    return not (plain and style.header)


def _head(title: str, window: str, out: TextIO) -> None:
    rule = "-" * 80
    print(f"{rule}\n{title}\n{window}\n{rule}", file=out)
