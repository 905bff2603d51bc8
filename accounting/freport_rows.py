"""The words and columns of freport's reports. Pure."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting import layout, windows
from scheduler.contracts import times
from scheduler.contracts.command_line import CommandError

REPORTS = ("cluster", "team", "user", "model", "tier")
RECONCILE_TITLE = "Leases in Forebay's and in Slurm's books, GPU time in Seconds"
_UNITS = {"Seconds": 1_000_000, "Minutes": 60_000_000, "Hours": 3_600_000_000, "Percent": 0}
_MEASURES = ("gpu", "tokens")
_KEYS = {
    "cluster": ("cluster",),
    "team": ("team",),
    "user": ("team", "user"),
    "model": ("model",),
    "tier": ("tier",),
}
_TOKENS = (
    ("Requests", "requests"),
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
        CommandError: an unknown one, or cost, which needs rates.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if "cost" in names:
        raise CommandError(
            "-T cost needs rates, which this release does not have: use gpu or tokens"
        )
    for name in names:
        if name not in _MEASURES:
            raise CommandError(f"invalid measure {name!r}: gpu or tokens")
    if not names:
        raise CommandError("-T needs gpu, tokens or both")
    return tuple(names)


def with_percent(rows: Sequence[Mapping[str, Any]], chosen: str) -> list[dict[str, Any]]:
    """Add to each row what was allocated in its period, for ``-t Percent``.

    Raises:
        CommandError: Percent, and not all GPU time is in the rows.
    """
    total: dict[int, int] = {}
    for row in rows:
        total[row["start_us"]] = total.get(row["start_us"], 0) + row["gpu_us"]
    if chosen == "Percent" and any(total.values()) and all(row["what"] == "used" for row in rows):
        raise CommandError(
            "-t Percent is of all GPU time: only admins see that, and without filters"
        )
    return [{**row, "allocated_us": total[row["start_us"]]} for row in rows]


def columns(report: str, chosen: str, shown: Sequence[str]) -> list[layout.Column]:
    """Return the columns of a report."""
    found = [layout.Column("Start", -19, _point("start_us"))]
    for place, name in enumerate(_KEYS[report]):
        found.append(layout.Column(name.capitalize(), -12, _key(name, first=place == 0)))
    if "gpu" in shown:
        found.append(layout.Column("GPU", 10, _gpu(chosen)))
    if "tokens" in shown:
        for title, name in _TOKENS:
            found.append(layout.Column(title, 10, _count(name)))
    return found


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
