"""Where GPU time went that answered nobody: by cause and period, with what rollovers held twice.

Causes are those of the table ``gpu_minutes``; with what was attributed they add up to what was allocated.
Time that a lease and its successor held at once (``overlap``) is in these parts already, as whatever its
GPUs did then: it is told beside them.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accounting import books, public, settings, windows

OVERLAP = "overlap"
HOUR_US = 3_600_000_000
Overlaps = Callable[
    [], Mapping[int, int]
]  # UTC µs at which an hour begins, to GPU-µs held twice in it


def by_cause(
    state_dir: Path,
    table: settings.Accounting,
    window: windows.Window,
    cuts: Sequence[int],
    overlaps: Mapping[int, int],
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return a row for each period and cause, and what could not be read. Blocks.

    Args:
        state_dir: Forebay's state folder.
        table: the settings.
        window: of whole minutes.
        cuts: borders of the periods, ascending.
        overlaps: GPU-µs that rollovers held twice, by hour; an hour counts whole, where it begins, and in the
            first period if it begins before: windows that end within an hour both tell it.
    """
    sums: dict[tuple[int, str, str], int] = {}
    allocated = [0] * (len(cuts) - 1)
    records = books.Books(state_dir, memory_mb=table.memory_mb, at_most_s=table.report_at_most_s)
    with records.reading(window.start_us, window.end_us) as reading:
        problems = reading.problems  # of the same rows that the minutes are made from
        reading.session.register("gpu_minutes", public.minutes(records, table, window))
        found = reading.session.execute(
            "SELECT minute_us, kind, why, sum(gpu_us)::BIGINT FROM gpu_minutes GROUP BY ALL"
        ).fetchall()
    for minute_us, kind, why, gpu_us in found:
        period = _period(cuts, minute_us)
        allocated[period] += gpu_us
        if kind != "attributed":
            sums[period, kind, why] = sums.get((period, kind, why), 0) + gpu_us
    for hour_us, gpu_us in overlaps.items():
        if cuts[0] // HOUR_US * HOUR_US <= hour_us < cuts[-1]:
            key = _period(cuts, hour_us), OVERLAP, "rollover"
            sums[key] = sums.get(key, 0) + gpu_us
    rows = [
        {
            "start_us": cuts[period],
            "kind": kind,
            "why": why,
            "gpu_us": gpu_us,
            "allocated_us": allocated[period],
        }
        for (period, kind, why), gpu_us in sorted(
            sums.items(), key=lambda item: (item[0][0], item[0][1] == OVERLAP, item[0][1:])
        )
    ]
    return rows, problems


def _period(cuts: Sequence[int], at_us: int) -> int:
    return min(max(0, bisect.bisect_right(cuts, at_us) - 1), len(cuts) - 2)
