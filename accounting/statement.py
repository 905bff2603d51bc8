"""A team's month as one HTML file that a principal investigator can be sent: no scripts, no links, no fonts.

Everything is in the file, charts as SVG; every value is escaped by Jinja. Costs and amounts are the bill's
own lines, so that the statement and the bill can't disagree.
"""

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from accounting import charts, layout, money, rates, windows
from scheduler.contracts import stored

Ask = Callable[[str, str, str], list[dict[str, Any]]]
_KINDS = ("uncached_prompt", "cached_prompt", "output")
_SHOWN = {
    "uncached_prompt": "Prompt",
    "cached_prompt": "Cached prompt",
    "output": "Output",
    "gpu": "GPU time",
}
_HOUR_US = 3_600_000_000


@dataclasses.dataclass(slots=True)
class _Row:
    """A line of a table: who or what, and its sums."""

    names: tuple[str, ...]
    uncached_prompt: int = 0
    cached_prompt: int = 0
    output: int = 0
    gpu: int = 0
    cost: int = 0

    @property
    def tokens(self) -> int:
        return self.uncached_prompt + self.cached_prompt + self.output


def render(
    bill: Mapping[str, Any],
    teams: Sequence[str],
    ask: Ask,
    prices: Sequence[Mapping[str, Any]],
    now: datetime.datetime,
) -> str:
    """Return the page.

    Args:
        bill: the answer of ``/bill``.
        teams: whose statements, one after the other.
        ask: gets rows of ``/rollup`` for a team, a group and a unit.
        prices: the site's rates.
        now: when it is made.
    """
    import jinja2

    page = jinja2.Environment(
        loader=jinja2.PackageLoader("accounting", "."),
        autoescape=True,
        finalize=_cell,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    zone = windows.zone(bill["zone"])
    page.filters.update(
        count=lambda value: f"{value:,}",
        hours=lambda value: f"{value / _HOUR_US:,.2f}",
        money=_money,
        exact=money.show,
        moment=lambda us: _day(windows.moment(us).astimezone(zone), clock=True),
        day=lambda us: _day(windows.moment(us).astimezone(zone)),
    )
    first = datetime.date.fromisoformat(f"{bill['month']}-01")
    return page.get_template("statement.html").render(
        title=f"{first:%B %Y}",
        bill=bill,
        statements=[_statement(bill, team, ask, zone) for team in teams],
        prices=_current(prices, bill["window"]),
        made=_day(now.astimezone(zone), clock=True),
        shown=_SHOWN,
    )


def _cell(value: Any) -> Any:
    """A table that is copied from the page into a spreadsheet brings no formula with it."""
    return layout.harmless(value) if type(value) is str else value


def _day(at: datetime.datetime, *, clock: bool = False) -> str:
    return f"{at.day} {at:%B %Y, %H:%M}" if clock else f"{at.day} {at:%B %Y}"


def _money(micro: int) -> str:
    """To the cent, and as exact as it is below one unit."""
    if micro and abs(micro) < money.MICRO:
        return money.show(micro)
    whole, _, part = layout.decimal(abs(micro), money.MICRO, 2).partition(".")
    return f"{'-' if micro < 0 else ''}{int(whole):,}.{part}"


def _statement(
    bill: Mapping[str, Any], team: str, ask: Ask, zone: datetime.tzinfo
) -> dict[str, Any]:
    lines = [line for line in bill["rows"] if line["team"] == team]
    own = [line for line in lines if line["what"] != "adjustment" and not line["late"]]
    # Several periods where the month was closed in another zone than today's; a line that was sent again
    # in the next one is two requests then.
    month = _month(ask(team, "team", "month"))
    days = ask(team, "model", "day")
    borders = windows.periods(stored.read(windows.Window, bill["window"]), "day", zone)
    models = list(dict.fromkeys(row.names[0] for row in _summed(own, ("model",))))
    return {
        "team": team,
        "total": sum(line["cost"] for line in lines),
        "usage": _summed(own, ())[0] if own else _Row(()),
        "month": month,
        "models": _summed(own, ("model", "tier")),
        "users": _summed(own, ("user",)),
        "lines": lines,
        "others": [line for line in lines if line["late"] or line["what"] == "adjustment"],
        "tokens_chart": _chart(days, (borders, zone, models), _tokens, "tokens"),
        "gpu_chart": _chart(days, (borders, zone, models), _gpu_hours, "GPU-hours"),
    }


def _month(found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    names = ("requests", "attempts", "platform_tokens")
    return {name: sum(row[name] for row in found) for name in names}


def _tokens(row: Mapping[str, Any]) -> float:
    return float(sum(row[f"{kind}_tokens"] for kind in _KINDS))


def _gpu_hours(row: Mapping[str, Any]) -> float:
    return float(row["gpu_us"] / _HOUR_US)


def _chart(
    rows: Iterable[Mapping[str, Any]],
    frame: tuple[Sequence[int], datetime.tzinfo, Sequence[str]],
    value: Callable[[layout.Row], float],
    axis: str,
) -> str:
    """Return a chart with every day of the month, also those without any use; "" if there is none at all."""
    found, (borders, zone, models) = list(rows), frame
    first = (*models, "")[0]
    if not any(value(row) for row in found):
        return ""
    empty = dict.fromkeys((*(f"{kind}_tokens" for kind in _KINDS), "gpu_us"), 0)
    days = [
        {"start_us": start, "model": first, **empty} for start, _ in itertools.pairwise(borders)
    ]
    chart = charts.stacked(
        [*days, *found], lambda row: str(row["model"]), value, ("day", zone), models
    )
    return charts.svg(chart, axis)


def _summed(lines: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[_Row]:
    rows: dict[tuple[str, ...], _Row] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        row = rows.setdefault(key, _Row(key))
        setattr(row, line["what"], getattr(row, line["what"]) + line["amount"])
        row.cost += line["cost"]
    return sorted(rows.values(), key=lambda row: (-row.cost, -row.tokens, row.names))


def _current(
    prices: Iterable[Mapping[str, Any]], window: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the rates that held in the window: those that began in it, and the one before them."""
    scopes: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for price in sorted(prices, key=lambda each: (each["from_us"], each["posting"])):
        if price["from_us"] >= window["end_us"]:
            continue
        held = scopes.setdefault((price["model"], price["tier"], price["use"]), [])
        if price["from_us"] <= window["start_us"]:
            held.clear()
        held.append(price)
    uses = list(rates.Use)
    found = [dict(price) for held in scopes.values() for price in held]
    return sorted(
        found, key=lambda p: (p["model"], p["tier"], uses.index(rates.Use(p["use"])), p["from_us"])
    )
