"""GPU time summed by period and owner: from the table `gpu_minutes` where it is complete, else from the rows.

The borders of the periods may lie anywhere. An hour that the table has and that no border cuts within a
minute is read from it; everything else is shared out here and now, by the same rules.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from accounting import books, gpu_lines, gpu_minutes, stepcost

KEYS = ("cluster", *gpu_lines.OWNER)
_HOUR = gpu_minutes.HOUR_US


@dataclasses.dataclass(slots=True)
class Share:
    """Where the GPU-µs of a period went; the parts add up to `allocated`.

    Attributes:
        attributed: by owner, the values of the names that were asked for.
        dedicated: idle and start-up time of a team's own floor, by owner likewise (user, tier and
            endpoint are ""); not in `idle` and `starting`.
    """

    allocated: int = 0
    idle: int = 0
    starting: int = 0
    waste: int = 0
    attributed: dict[tuple[Any, ...], int] = dataclasses.field(default_factory=dict)
    dedicated: dict[tuple[Any, ...], int] = dataclasses.field(default_factory=dict)

    def add(self, kind: str, owner: tuple[Any, ...], team: str, gpu_us: int) -> None:
        """Add a line; `owner` is read where the time is somebody's."""
        self.allocated += gpu_us
        if kind == "attributed":
            self.attributed[owner] = self.attributed.get(owner, 0) + gpu_us
        elif kind == "waste":
            self.waste += gpu_us
        elif team:
            self.dedicated[owner] = self.dedicated.get(owner, 0) + gpu_us
        elif kind == "idle":
            self.idle += gpu_us
        else:
            self.starting += gpu_us


def by_owner(
    records: books.Books, cuts: Sequence[int], otherwise: stepcost.Cost
) -> tuple[list[Share], tuple[str, ...]]:
    """Sum GPU time by `KEYS` in each period.

    Args:
        records: the recorded rows, for what is not in the table beside them.
        cuts: borders of the periods, ascending, at least two.
        otherwise: a token's cost for models of which too little is known.

    Returns:
        One share for each period, and what could not be read.
    """
    folder = records.state_dir / gpu_minutes.FOLDER
    sums = [Share() for _ in cuts[1:]]
    stored = {
        hour_us: str(folder / hour.file)
        for hour_us, hour in gpu_minutes.current(records.state_dir, cuts[0], cuts[-1]).items()
        if not _cut_within_a_minute(hour_us, cuts)
    }
    for row in _read(list(stored.values()), cuts):
        period, kind, gpu_us, *owner = row
        sums[period].add(kind, tuple(owner), owner[1], int(gpu_us))
    problems: list[str] = []
    for first, last in gaps(stored, cuts[0], cuts[-1]):
        with records.reading(max(0, first - gpu_minutes.LONGEST_REQUEST_US), last) as reading:
            problems += reading.problems
            table = live(reading, first, last, otherwise, cuts=cuts, folder=folder)
            if table is not None:
                for row in _summed(table, cuts):
                    period, kind, gpu_us, *owner = row
                    sums[period].add(kind, tuple(owner), owner[1], int(gpu_us))
    return sums, tuple(dict.fromkeys(problems))


def live(
    reading: books.Reading,
    first_us: int,
    last_us: int,
    otherwise: stepcost.Cost,
    *,
    cuts: Sequence[int] = (),
    folder: Path | None = None,
) -> Any:
    """Share out a window of a reading as a table like `gpu_minutes`; None if no lease held anything.

    With ``cuts`` a minute that is cut has several beginnings, each in its own period.
    """
    span = gpu_lines.extent(reading, first_us, last_us)
    if span is None:
        return None
    before = gpu_minutes.sums_before(folder, span[0] // _HOUR * _HOUR) if folder else {}
    borders = gpu_lines.minutes(*span, cuts)
    table = gpu_lines.to_arrow(gpu_lines.find(reading, borders, otherwise, before=before))
    if cuts:
        return table
    place = table.schema.get_field_index("minute_us")
    whole = [
        at // gpu_lines.MINUTE_US * gpu_lines.MINUTE_US for at in table["minute_us"].to_pylist()
    ]
    return table.set_column(place, "minute_us", pa.array(whole, pa.int64()))


def by_names(
    reading: books.Reading, cuts: Sequence[int], otherwise: stepcost.Cost, names: Sequence[str]
) -> list[Share]:
    """Sum attributed GPU time by any columns of the usage rows (an attempt's own, say), from the rows.

    Idle and start-up time of a dedicated floor count as nobody's here.
    """
    sums = [Share() for _ in cuts[1:]]
    span = gpu_lines.extent(reading, cuts[0], cuts[-1])
    if span is None:
        return sums
    found = gpu_lines.find(reading, gpu_lines.minutes(*span, cuts), otherwise, names=names)
    lines = found.lines
    periods = [bisect.bisect_right(cuts, start) - 1 for start in found.borders[:-1].tolist()]
    for at, kind, item, gpu_us in zip(
        lines.period.tolist(),
        lines.kind.tolist(),
        lines.item.tolist(),
        lines.gpu_us.tolist(),
        strict=True,
    ):
        owner = found.owners[item] if item >= 0 else ()
        sums[periods[at]].add(gpu_lines.WORDS[kind][0], owner, "", gpu_us)
    return sums


def gaps(hours: Iterable[int], first_us: int, last_us: int) -> list[tuple[int, int]]:
    """Return the stretches of a window that none of the hours covers."""
    found, at = [], first_us
    for hour_us in sorted(hours):
        if hour_us > at:
            found.append((at, hour_us))
        at = max(at, hour_us + _HOUR)
    if at < last_us:
        found.append((at, last_us))
    return found


def lines(folder: Path, hours: Iterable[gpu_minutes.Hour]) -> list[dict[str, Any]]:
    """Return the lines of some hours of the table as they are."""
    found: list[dict[str, Any]] = []
    for hour in hours:
        found += pq.read_table(folder / hour.file).to_pylist()
    return found


def _cut_within_a_minute(hour_us: int, cuts: Sequence[int]) -> bool:
    low, high = bisect.bisect_right(cuts, hour_us), bisect.bisect_left(cuts, hour_us + _HOUR)
    return any(cut % gpu_lines.MINUTE_US for cut in cuts[low:high])


_COLUMNS = ", ".join(f'"{name}"' for name in KEYS)


def _read(files: Sequence[str], cuts: Sequence[int]) -> list[tuple[Any, ...]]:
    if not files:
        return []
    with _session() as session:
        session.read_parquet(list(files), hive_partitioning=False).create_view("lines")
        return _query(session, cuts)


def _summed(table: Any, cuts: Sequence[int]) -> list[tuple[Any, ...]]:
    with _session() as session:
        session.register("lines", table)
        return _query(session, cuts)


def _session() -> Any:
    options: dict[str, Any] = {"autoinstall_known_extensions": False}
    return duckdb.connect(":memory:", config=options)


def _query(session: Any, cuts: Sequence[int]) -> list[tuple[Any, ...]]:
    periods = pa.table(
        {
            "period": pa.array(range(len(cuts) - 1), pa.int64()),
            "begins": pa.array(cuts[:-1], pa.int64()),
            "ends": pa.array(cuts[1:], pa.int64()),
        }
    )
    session.register("periods", periods)
    found: list[tuple[Any, ...]] = session.execute(
        f"SELECT period, kind, sum(gpu_us), {_COLUMNS} FROM lines "  # noqa: S608 - column names of ours
        "JOIN periods ON minute_us >= begins AND minute_us < ends "
        f"GROUP BY period, kind, {_COLUMNS}"
    ).fetchall()
    return found
