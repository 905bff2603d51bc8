"""fctl's words about money: rate, adjust and close-month, in sacctmgr's manners."""

import argparse
import datetime
import os
from collections.abc import Sequence
from typing import Any, TextIO

from accounting import bill, layout, money, rates, windows
from scheduler.contracts import command_line, ports, requests, times
from scheduler.contracts.command_line import CommandError

_PRICES = {
    "uncached": rates.Use.UNCACHED,
    "cached": rates.Use.CACHED,
    "output": rates.Use.OUTPUT,
    "gpuhour": rates.Use.GPU,
}
_WORDS = ("model", "tier", *_PRICES, "from", "reason")
_NAMES = {use: word for word, use in _PRICES.items()}


def _column(name: str, width: int, key: str) -> layout.Column:
    return layout.Column(name, width, lambda row, _: str(row[key]))


_COLUMNS = (
    _column("Model", -12, "model"),
    _column("Tier", -11, "tier"),
    layout.Column("What", -9, lambda row, _: _NAMES[rates.Use(row["use"])]),
    layout.Column("Price", 12, lambda row, _: money.show(int(row["micro"]))),
    layout.Column("For", -11, lambda row, _: "GPU-hour" if row["use"] == "gpu" else "1000 tokens"),
    layout.Column("From", 19, lambda row, tz: times.print_point(int(row["from_us"]), tz)),
    _column("State", -7, "state"),
    layout.Column("Added", 19, lambda row, tz: times.print_point(int(row["added_us"]), tz)),
    _column("Author", -8, "author"),
    _column("Reason", -24, "reason"),
    _column("Posting", 7, "posting"),
)


def add(commands: Any) -> None:
    """Declare the commands below fctl's; each has ``act(args, api, out, stdin)``."""
    rate = commands.add_parser("rate", help="add and show prices of tokens and GPU time")
    verbs = rate.add_subparsers(dest="verb", required=True, metavar="VERB")
    new = verbs.add_parser(
        "add",
        help="set prices from a moment on; nothing that was used before changes its price",
        epilog="examples:\n  fctl rate add uncached=0.50 cached=0.05 output=1.50 reason='first list'\n"
        "  fctl rate add model=chat tier=batch output=0.75 from=2026-12-01 reason='batch is cheaper'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("pairs", nargs="+", metavar="K=V", help=", ".join(_WORDS))
    new.add_argument("-r", "--reason", default="", help="why; kept with the rate")
    new.set_defaults(act=_rate_add)
    show = verbs.add_parser("show", aliases=["list"], help="show the rates that hold or will hold")
    show.add_argument("model", nargs="?", default="", help="only what applies to this model")
    show.add_argument("-a", "--all", action="store_true", help="past ones too")
    show.add_argument(
        "-o", "--format", default="", metavar="FIELDS", help="comma list, field%%width"
    )
    show.add_argument("-n", "--noheader", action="store_true")
    show.add_argument("-P", "--parsable2", action="store_true", help="fields parted by |")
    show.add_argument("-p", "--parsable", action="store_true", help="the same, with a | at the end")
    show.set_defaults(act=_rate_show)
    adjust = commands.add_parser("adjust", help="add an amount to a team's bill (-5: a credit)")
    adjust.add_argument("team")
    adjust.add_argument("amount", type=_amount, help="in the site's currency: 12.50 or -12.50")
    adjust.add_argument(
        "--month", default="", metavar="YYYY-MM", help="what it is for (this month)"
    )
    adjust.add_argument("-r", "--reason", required=True, help="why; printed on the bill")
    adjust.add_argument("--force", action="store_true", help="also for a team that nobody knows")
    adjust.set_defaults(act=_adjust)
    close = commands.add_parser("close-month", help="make a month's bill final")
    close.add_argument("month", metavar="YYYY-MM")
    close.add_argument("-r", "--reason", default="", help="kept with the closing")
    close.add_argument("-y", "--yes", action="store_true", help="do not ask")
    close.set_defaults(act=_close)
    for verb in (new, show, adjust, close):
        verb.add_argument("--json", action="store_true", help="print JSON")


def _rate_add(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    pairs = _pairs(args.pairs)
    reason = args.reason or pairs.pop("reason", "")
    if not reason:
        raise CommandError("rate add: say why: reason='list of December'")
    given = {_PRICES[word]: pairs.pop(word) for word in list(pairs) if word in _PRICES}
    if not given:
        raise CommandError(f"rate add: no price given: one or more of {', '.join(_PRICES)}")
    for use, text in given.items():
        _read(text, _NAMES[use])
    body: dict[str, Any] = {
        "model": pairs.get("model", rates.ANY),
        "prices": {use.value: text for use, text in given.items()},
        "from_us": _from(pairs["from"]) if "from" in pairs else 0,
        "reason": reason,
    }
    if (tier := pairs.get("tier", rates.ANY)) != rates.ANY:
        if tier not in set(requests.Tier):
            raise CommandError(f"tier={tier}: no such tier; known are {', '.join(requests.Tier)}")
        body["tier"] = tier
    answer = api.call("POST", "/admin/rates", json=body).json
    if args.json:
        command_line.print_json(answer, out)
        return
    for item in answer["rates"]:
        since = times.print_point(item["from_us"], times.local_zone(os.environ))
        command_line.say(
            f"model {item['model']}, tier {item['tier']}: {_NAMES[rates.Use(item['use'])]} "
            f"{money.show(item['micro'])} from {since}",
            out,
        )


def _rate_show(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("GET", "/admin/rates").json
    rows = _stated(answer["rates"], round(datetime.datetime.now(datetime.UTC).timestamp() * 1e6))
    if args.model:
        rows = [row for row in rows if row["model"] in {args.model, rates.ANY}]
    if not args.all:
        rows = [row for row in rows if row["state"] != "past"]
    if args.json:
        command_line.print_json({**answer, "rates": rows}, out)
        return
    columns = layout.choose(args.format, _COLUMNS) if args.format else list(_COLUMNS)
    delimiter = "|" if args.parsable or args.parsable2 else ""
    style = layout.Style(delimiter, bool(args.parsable), not args.noheader)
    layout.print_rows(columns, rows, times.local_zone(os.environ), style, out)


def _stated(found: Sequence[dict[str, Any]], now_us: int) -> list[dict[str, Any]]:
    """Add whether each rate is past, now or future, and put them in order of scope."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in found:  # in order of beginning
        if row["from_us"] <= now_us:
            newest[row["model"], row["tier"], row["use"]] = row
    holding = {id(row) for row in newest.values()}
    for row in found:
        row["state"] = "now" if id(row) in holding else "past"
        if row["from_us"] > now_us:
            row["state"] = "future"
    uses = [use.value for use in rates.Use]
    return sorted(
        found, key=lambda row: (row["model"], row["tier"], uses.index(row["use"]), row["from_us"])
    )


def _adjust(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    month = args.month or _this_month(api)
    body = {"team": args.team, "amount": args.amount, "month": month, "reason": args.reason}
    if args.force:
        body["force"] = True
    line = api.call("POST", "/admin/adjustments", json=body).json
    where = f"the bill of {line['month']}"
    if line["late"]:
        where += f", since {line['used_month']} is closed"
    _done(args, out, line, f"{line['team']}: {money.show(line['cost'])} on {where}")


def _close(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    windows.of_month(args.month, datetime.UTC)
    question = f"Close {args.month} for good? Its bill can't be changed afterwards."
    command_line.confirm(question, yes=args.yes, out=out, stdin=stdin)
    body = {"month": args.month, "reason": args.reason}
    made = api.call("POST", "/admin/closings", json=body).json
    text = f"{made['month']} is closed: {made['lines']} lines, {money.show(made['total'])}"
    _done(args, out, made, text)


def _done(args: Any, out: TextIO, answer: Any, text: str) -> None:
    if args.json:
        command_line.print_json(answer, out)
    else:
        command_line.say(text, out)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """Read K=V; keys in either case and by unambiguous prefix, sacctmgr's ``set`` and ``where`` ignored."""
    found: dict[str, str] = {}
    for word in words:
        if word.lower() in {"set", "where"}:
            continue
        key, sign, value = word.partition("=")
        fits = [known for known in _WORDS if key and known.startswith(key.lower())]
        fits = [key.lower()] if key.lower() in _WORDS else fits
        if not sign or not value or len(fits) != 1:
            raise CommandError(f"rate add: {word}: write KEY=VALUE, KEY one of {', '.join(_WORDS)}")
        found[fits[0]] = value
    return found


def _from(text: str) -> int:
    now = datetime.datetime.now(datetime.UTC)
    try:
        at = times.point(text, now=now, tz=times.local_zone(os.environ))
    except times.TimeError as error:
        raise CommandError(f"from: {error}") from error
    return max(1, windows.to_us(at))


def _amount(text: str) -> str:
    """Check an amount where argparse reads it; it is sent as it was written."""
    _read(text, "amount")
    return text


def _read(text: str, what: str) -> int:
    try:
        return money.read(text)
    except ValueError as error:
        raise CommandError(f"{what}: {error}") from error


def _this_month(api: ports.Api) -> str:
    zone = windows.zone(api.call("GET", "/admin/rates").json["zone"])
    return bill.month_of(windows.to_us(datetime.datetime.now(datetime.UTC)), zone)
