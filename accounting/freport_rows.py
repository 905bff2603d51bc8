"""The words and columns of freport's reports. Pure."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting import layout, money, windows
from scheduler.contracts import times
from scheduler.contracts.command_line import CommandError

REPORTS = ("cluster", "team", "user", "model", "tier", "endpoint")
RECONCILE_TITLE = "Leases in Forebay's and in Slurm's books, GPU time in Seconds"
ACCOUNTS_TITLE = "Slurm accounts in three books, whole hours, GPU time in Seconds"
_UNITS = {"Seconds": 1_000_000, "Minutes": 60_000_000, "Hours": 3_600_000_000, "Percent": 0}
_WIDE = {"model": -24, "endpoint": -24}  # their names are long
MEASURES = ("gpu", "tokens", "cost", "efficiency")
_KEYS = {
    "cluster": ("cluster",),
    "team": ("team",),
    "user": ("team", "user"),
    "model": ("model",),
    "tier": ("tier",),
    "endpoint": ("endpoint",),
}
_NOBODYS = ("idle", "starting", "waste")
_TOKENS = (
    ("Requests", "requests"),
    ("Attempts", "attempts"),
    ("Uncached", "uncached_prompt_tokens"),
    ("Cached", "cached_prompt_tokens"),
    ("Output", "output_tokens"),
    ("Platform", "platform_tokens"),
)


def period(words: Sequence[str]) -> str:
    """Return the period of ``by hour`` (or ``hour``); a day if nothing is said.

    Raises:
        CommandError: these words mean nothing.
    """
    rest = [word.lower() for word in words]
    if rest[:1] == ["by"]:
        rest = rest[1:]
    elif not rest:
        return "day"
    if len(rest) == 1 and rest[0] in windows.UNITS:
        return rest[0]
    raise CommandError(f"what is {' '.join(words)!r}? Write: by hour, by day or by month")


def unit(text: str) -> str:
    """Return the unit of ``-t``, by prefix and in either case.

    Raises:
        CommandError: there is no such unit.
    """
    found = [name for name in _UNITS if text and name.lower().startswith(text.lower())]
    if len(found) != 1:
        raise CommandError(f"invalid unit {text!r}: Seconds, Minutes, Hours or Percent")
    return found[0]


def measures(text: str) -> tuple[str, ...]:
    """Return the measures of ``-T``.

    Raises:
        CommandError: an unknown one, or none.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if names == ["all"]:  # as with sreport
        return MEASURES
    for name in names:
        if name not in MEASURES:
            raise CommandError(f"invalid measure {name!r}: {', '.join(MEASURES)}, or all")
    if not names:
        raise CommandError(f"-T needs one or more of {', '.join(MEASURES)}")
    return tuple(names)


def with_percent(
    rows: Sequence[Mapping[str, Any]], chosen: str, *, whole: bool
) -> list[dict[str, Any]]:
    """Add to each row what was allocated in its period, for ``-t Percent``.

    Args:
        rows: of the report.
        chosen: the unit of GPU time.
        whole: whether all GPU time is in the rows, also what is nobody's.

    Raises:
        CommandError: Percent, and not all GPU time is in the rows.
    """
    total: dict[int, int] = {}
    for row in rows:
        total[row["start_us"]] = total.get(row["start_us"], 0) + row["gpu_us"]
    if chosen == "Percent" and not whole:
        raise CommandError(
            "-t Percent is of all GPU time, which is shown to admins, and without -A, -u, -M, --model "
            "or --tier: take -t Hours"
        )
    return [{**row, "allocated_us": total[row["start_us"]]} for row in rows]


def columns(report: str, chosen: str, shown: Sequence[str]) -> list[layout.Column]:
    """Return the columns of a report."""
    found = [layout.Column("Start", -19, _point("start_us"))]
    for place, name in enumerate(_KEYS[report]):
        width = _WIDE.get(name, -12)
        found.append(layout.Column(name.capitalize(), width, _key(name, first=place == 0)))
    if "gpu" in shown:
        found.append(layout.Column("GPU", 10, _gpu(chosen)))
    if "tokens" in shown:
        for title, name in _TOKENS:
            found.append(layout.Column(title, 10, _count(name)))
    if "cost" in shown:
        found.append(layout.Column("Cost", 14, _money("cost_micro"), point=True))
    if "efficiency" in shown:
        found.append(layout.Column("TokensPerGPUHour", 16, _tokens_per_gpu_hour))
        found.append(layout.Column("CostPer1kTokens", 15, _cost_per_1k))
    return found


def stored(report: str) -> dict[str, type]:
    """Return the columns of ``--parquet``, which are the same whatever was found."""
    counts = ("requests", "attempts", "ok", "refused", "platform_tokens")
    sums = (
        "uncached_prompt_tokens",
        "cached_prompt_tokens",
        "output_tokens",
        "gpu_us",
        "cost_micro",
    )
    return {
        **dict.fromkeys(("start_us", "end_us"), int),
        **dict.fromkeys(("what", *_KEYS[report]), str),
        **dict.fromkeys((*counts, *sums, "allocated_us"), int),
    }


def compared(by: str) -> dict[str, type]:
    """Return the columns of ``--parquet`` of the report that compares leases or accounts."""
    from accounting import account_books, reconcile  # only here: with them comes DuckDB

    return layout.types_of(account_books.Account if by == "account" else reconcile.Compared)


def tokens(row: layout.Row) -> int:
    """Return all tokens that the team pays for."""
    return sum(
        int(row[f"{kind}_tokens"]) for kind in ("uncached_prompt", "cached_prompt", "output")
    )


def value(row: layout.Row, measure: str) -> float:
    """Return what a chart shows of a row: GPU-hours, tokens, cost, or tokens per GPU-hour."""
    if measure == "tokens":
        return float(tokens(row))
    if measure == "cost":
        return int(row["cost_micro"]) / money.MICRO
    hours = int(row["gpu_us"]) / _UNITS["Hours"]
    if measure == "gpu":
        return hours
    return tokens(row) / hours if hours else 0.0


def measured(measure: str, currency: str) -> str:
    """Return the words on a chart's axis."""
    return {
        "gpu": "GPU-hours",
        "tokens": "tokens",
        "cost": currency,
        "efficiency": "tokens per GPU-hour",
    }[measure]


def group(row: layout.Row, report: str) -> str:
    """Return the name of a row's group; parts are joined for people, never for keys."""
    if row["what"] != "used":
        return f"({row['what']})"
    return " ".join(str(row[name]) for name in _KEYS[report])


def _money(name: str) -> Callable[[layout.Row, datetime.tzinfo], str]:
    return lambda row, _: "" if row.get("what") in _NOBODYS else money.show(int(row[name]))


def _tokens_per_gpu_hour(row: layout.Row, _: datetime.tzinfo) -> str:
    if row["what"] in _NOBODYS or not row["gpu_us"]:
        return ""
    return layout.decimal(tokens(row) * _UNITS["Hours"], int(row["gpu_us"]), 0)


def _cost_per_1k(row: layout.Row, _: datetime.tzinfo) -> str:
    count = tokens(row)
    if row["what"] in _NOBODYS or not count:
        return ""
    return layout.decimal(int(row["cost_micro"]) * 1_000, count * money.MICRO, 6)


def _point(name: str) -> Callable[[layout.Row, datetime.tzinfo], str]:
    return lambda row, tz: times.print_point(int(row[name]), tz)


def _key(name: str, *, first: bool) -> Callable[[layout.Row, datetime.tzinfo], str]:
    def text(row: layout.Row, _: datetime.tzinfo) -> str:
        if row["what"] != "used":
            return f"({row['what']})" if first else ""
        return str(row[name])

    return text


def _gpu(chosen: str) -> Callable[[layout.Row, datetime.tzinfo], str]:
    def text(row: layout.Row, _: datetime.tzinfo) -> str:
        if chosen == "Percent":
            whole = int(row["allocated_us"])
            return layout.decimal(100 * int(row["gpu_us"]), whole, 2) if whole else "0.00"
        return layout.decimal(int(row["gpu_us"]), _UNITS[chosen], 0 if chosen == "Seconds" else 2)

    return text


def _count(name: str) -> Callable[[layout.Row, datetime.tzinfo], str]:
    return lambda row, _: "" if row["what"] != "used" else str(row[name])


def _seconds(name: str) -> Callable[[layout.Row, datetime.tzinfo], str]:
    def text(row: layout.Row, _: datetime.tzinfo) -> str:
        return "Unknown" if row[name] is None else layout.decimal(int(row[name]), 1_000_000, 1)

    return text


def _difference(row: layout.Row, _: datetime.tzinfo) -> str:
    if row["sacct_us"] is None:
        return ""
    return layout.decimal(int(row["forebay_us"]) - int(row["sacct_us"]), 1_000_000, 1)


def _agrees(row: layout.Row, _: datetime.tzinfo) -> str:
    return {True: "yes", False: "NO", None: "-"}[row["agrees"]]


def _plain(name: str) -> Callable[[layout.Row, datetime.tzinfo], str]:
    return lambda row, _: str(row[name])


WASTED: Mapping[str, type] = {
    "start_us": int,
    "kind": str,
    "why": str,
    "gpu_us": int,
    "allocated_us": int,
}


def waste(chosen: str) -> list[layout.Column]:
    """Return the columns of the report on GPU time that answered nobody."""
    return [
        layout.Column("Start", -19, _point("start_us")),
        layout.Column("Kind", -10, _plain("kind")),
        layout.Column("Cause", -12, _plain("why")),
        layout.Column("GPU", 12, _gpu(chosen)),
    ]


RECONCILE = [
    layout.Column("Lease", -14, _plain("lease_id")),
    layout.Column("SlurmJobID", 10, _plain("slurm_job_id")),
    layout.Column("GPUs", 5, _plain("gpus")),
    layout.Column("Forebay", 12, _seconds("forebay_us")),
    layout.Column("Sacct", 12, _seconds("sacct_us")),
    layout.Column("Difference", 10, _difference),
    layout.Column("Allowed", 8, _seconds("allowed_us")),
    layout.Column("Agrees", 6, _agrees),
    layout.Column("Note", -40, _plain("note")),
]


ACCOUNTS = [
    layout.Column("Account", -16, _plain("account")),
    layout.Column("Forebay", 14, _seconds("forebay_us")),
    layout.Column("Sacct", 14, _seconds("sacct_us")),
    layout.Column("Sreport", 14, _seconds("sreport_us")),
    layout.Column("Note", -40, _plain("note")),
]


def totals(rows: Sequence[layout.Row]) -> list[tuple[str, int]]:
    """Return the lines below a bill: what each team owes, if there are several, and all of them."""
    teams: dict[str, int] = {}
    for row in rows:
        teams[row["team"]] = teams.get(row["team"], 0) + int(row["cost"])
    several = sorted(teams.items()) if len(teams) > 1 else []
    return [*((f"Total of {team}", owed) for team, owed in several), ("Total", sum(teams.values()))]


def _amount(row: layout.Row, _: datetime.tzinfo) -> str:
    if row["unit"] == "gpu_us":
        return layout.decimal(int(row["amount"]), _UNITS["Hours"], 4)
    return str(row["amount"]) if row["unit"] else ""


def _unit_of(row: layout.Row, _: datetime.tzinfo) -> str:
    return {"gpu_us": "GPU-hours"}.get(str(row["unit"]), str(row["unit"]))


def _price(row: layout.Row, _: datetime.tzinfo) -> str:
    return money.show(int(row["price"])) if row["unit"] else ""


def _late(row: layout.Row, _: datetime.tzinfo) -> str:
    return f"late {row['used_month']}" if row["late"] else ""


BILL = [
    layout.Column("Team", -12, _plain("team")),
    layout.Column("User", -12, _plain("user")),
    layout.Column("Model", -12, _plain("model")),
    layout.Column("Tier", -11, _plain("tier")),
    layout.Column("What", -15, _plain("what")),
    layout.Column("Amount", 14, _amount),
    layout.Column("Unit", -9, _unit_of),
    layout.Column("Price", 13, _price, point=True),
    layout.Column("Cost", 17, _money("cost"), point=True),
    layout.Column("Late", -12, _late),
    layout.Column("Author", -8, _plain("author")),
    layout.Column("Reason", -24, _plain("reason")),
]
