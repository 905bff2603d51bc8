"""Charts as PNG and SVG, by matplotlib without a display: stacked bars over time.

Colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

import dataclasses
import datetime
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from accounting import layout, windows

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_OTHERS = "#999999"
_LABELS = {"hour": "%d %b %H:%M", "day": "%d %b", "month": "%b %Y"}
_INK = "#222222"


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """What a chart shows.

    Attributes:
        labels: of the periods, in order.
        series: for each group its values, one for each period; the largest group first.
    """

    labels: Sequence[str]
    series: Sequence[tuple[str, Sequence[float]]]


def stacked(
    rows: Sequence[layout.Row],
    group: Callable[[layout.Row], str],
    value: Callable[[layout.Row], float],
    periods: tuple[str, datetime.tzinfo],
    order: Sequence[str] = (),
) -> Stacked:
    """Return rows as series; beyond seven groups the small ones are one.

    Args:
        rows: with `start_us`.
        group: names a row's series.
        value: a row's height.
        periods: hour, day or month, and the zone of the labels.
        order: of the series, where several charts shall have the same colours; else by size.
    """
    unit, tz = periods
    starts = sorted({int(row["start_us"]) for row in rows})
    place = {start: number for number, start in enumerate(starts)}
    sums: dict[str, list[float]] = {}
    for row in rows:
        amounts = sums.setdefault(group(row), [0.0] * len(starts))
        amounts[place[int(row["start_us"])]] += value(row)
    rank = {name: number for number, name in enumerate(order)}
    ordered = sorted(
        sums.items(), key=lambda item: (rank.get(item[0], len(rank)), -sum(item[1]), item[0])
    )
    few = len(_COLOURS)
    if len(ordered) > few:
        rest = [sum(column) for column in zip(*(item[1] for item in ordered[few:]), strict=True)]
        ordered = [*ordered[:few], (f"{len(ordered) - few} others", rest)]
    labels = [f"{windows.moment(start).astimezone(tz):{_LABELS[unit]}}" for start in starts]
    return Stacked(labels, ordered)


def png(chart: Stacked, title: str, note: str, axis: str) -> bytes:
    """Return a picture of 1,600 by 800 points, for a slide or a mail."""
    return _picture(chart, (10, 5), "png", (title, note, axis))


def svg(chart: Stacked, axis: str) -> str:
    """Return an ``<svg>`` element for a page: no scripts, fonts or links, and the same for the same data."""
    text = _picture(chart, (9, 2.3), "svg", ("", "", axis)).decode()
    return text[text.index("<svg") :]


def _picture(
    chart: Stacked, size: tuple[float, float], form: str, words: tuple[str, str, str]
) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends import backend_agg
    from matplotlib.figure import Figure

    title, note, axis = words
    rc: Any = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "svg.fonttype": "path",  # the same letters on every machine
        "svg.hashsalt": "forebay",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "text.parse_math": False,  # a team called $x$ is no formula
    }
    with mpl.rc_context(rc), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn for it
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        backend_agg.FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _plot(axes, chart, title, axis)
        if note:
            axes.set_title(note, loc="right", fontsize=8, color="#666666", pad=12)
        sink = io.BytesIO()
        stamp = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(sink, format=form, metadata=stamp)
        return sink.getvalue()


def _plot(axes: Any, chart: Stacked, title: str, axis: str) -> None:
    from matplotlib import ticker

    places = range(len(chart.labels))
    below = [0.0] * len(chart.labels)
    for number, (name, values) in enumerate(chart.series):
        colour = _COLOURS[number] if number < len(_COLOURS) else _OTHERS
        axes.bar(places, values, 0.78, bottom=below, label=name.lstrip("_") or name, color=colour)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_ylabel(axis)
    axes.set_xlim(-0.6, max(len(chart.labels), 8) - 0.4)
    step = max(1, -(-len(chart.labels) // 12))
    axes.set_xticks(list(places)[::step], list(chart.labels)[::step])
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(_short))
    axes.yaxis.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    if len(chart.series) > 1 or title:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _short(value: float, _: object) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{letter}"
    return f"{value:g}"
