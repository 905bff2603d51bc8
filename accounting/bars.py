"""Bars on a terminal, by rich: one for each group of a report, the longest first."""

import shutil
from collections.abc import Sequence
from typing import TextIO

from rich import bar, box, console, table, text

from accounting import freport_rows, layout

_MOST = 20


def draw(
    rows: Sequence[layout.Row],
    report: str,
    what: tuple[str, str],
    out: TextIO,
    *,
    colour: bool,
) -> None:
    """Draw the groups' sums over the window; what is beyond the first 20 is one bar.

    Args:
        rows: of freport.
        report: its name.
        what: the measure and the currency.
        out: a terminal.
        colour: whether the bars may have one.
    """
    measure, currency = what
    sums: dict[str, float] = {}
    for row in rows:
        name = freport_rows.group(row, report)
        sums[name] = sums.get(name, 0.0) + freport_rows.value(row, measure)
    if measure == "efficiency":
        sums = _ratios(rows, report)
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) > _MOST and measure != "efficiency":
        rest = sum(amount for _, amount in ordered[_MOST - 1 :])
        ordered = [*ordered[: _MOST - 1], (f"({len(ordered) - _MOST + 1} others)", rest)]
    longest = max((amount for _, amount in ordered), default=0.0)
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    grid.add_column(report.capitalize(), no_wrap=True, max_width=30)
    grid.add_column(freport_rows.measured(measure, currency), justify="right", no_wrap=True)
    grid.add_column("", ratio=1)
    style = "cyan" if colour else "default"
    for name, amount in ordered:
        shown = f"{amount:,.0f}" if measure in {"tokens", "efficiency"} else f"{amount:,.2f}"
        grid.add_row(
            text.Text(layout.escaped(name, "")),
            shown,
            bar.Bar(longest or 1.0, 0.0, amount, color=style),
        )
    width = shutil.get_terminal_size().columns
    console.Console(
        file=out, no_color=not colour, width=width, highlight=False, force_terminal=colour
    ).print(grid)


def _ratios(rows: Sequence[layout.Row], report: str) -> dict[str, float]:
    """A ratio is of the sums, not a sum of ratios."""
    tokens: dict[str, int] = {}
    gpu_us: dict[str, int] = {}
    for row in rows:
        if row["what"] == "used":
            name = freport_rows.group(row, report)
            tokens[name] = tokens.get(name, 0) + freport_rows.tokens(row)
            gpu_us[name] = gpu_us.get(name, 0) + int(row["gpu_us"])
    return {name: tokens[name] * 3.6e9 / gpu_us[name] for name in tokens if gpu_us[name]}
