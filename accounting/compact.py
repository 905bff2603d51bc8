"""Files become few: an hour's when it is over, a day's when nobody can be at its attempts any more.

Rows of `usage` are merged (`accounting.merge`): one for each attempt, in order, so that a reader has nothing
to merge. That is done in pieces (`accounting.pieces`), since all rows of one request have the same arrival.
The same swap as the shipper's: new files are written, the manifest names them instead of the old ones, and
those are unlinked a quarter of an hour later, when no reading can still want them. Each row is in one
file that the manifest names, before and after.

The shipper leaves a file a minute. Hours are merged so that what reads a day that goes on opens some tens of
files and not a thousand. A row that comes in later lies beside the merged file, until its hour or its day is
merged again.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from accounting import manifest as manifests
from accounting import pieces, rollup, schema, ship
from scheduler.contracts import clock as clocks

OPEN_AT_MOST_S = 6 * 3600.0
HOUR_SETTLES_US = 10 * rollup.MINUTE_US  # most of an hour's rows are shipped by then
LOOSE_FILES = 32  # fewer are left as they are: an hour with late rows is merged whole
_NOT_MERGED = (duckdb.Error, pa.ArrowException, ValueError, ArithmeticError)


@dataclasses.dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did; `busy` if another process writes in the folder now.

    Attributes:
        given_up: attempts of which only OPEN was known, for so long that nobody can be at it any more.
    """

    files_before: int = 0
    files_after: int = 0
    repeated_rows: int = 0
    given_up: int = 0
    problems: tuple[str, ...] = ()
    busy: bool = False


class _Damaged(Exception):
    """Files that are not as they were written; names them."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Files of one table and day that are written anew, in these parts."""

    files: Sequence[manifests.File]
    parts: Sequence[pieces.Part]


def compact(
    state_dir: Path,
    clock: clocks.Clock,
    *,
    piece_rows: int = pieces.ROWS,
    open_at_most_s: float = OPEN_AT_MOST_S,
    loose_files: int = LOOSE_FILES,
) -> Compacted:
    """Merge the files of past UTC days, and of past hours of days that go on, by table. Blocks.

    Safe to kill and to repeat. What has a damaged file, or can't be merged, is left as it is. A day goes
    on until it ended ``open_at_most_s`` ago: then an attempt of which nothing but OPEN is known has ended
    with its gateway, and is recorded as that: outcome ``error``, at nobody's cost. Should its replica's
    row come after all, that one counts.

    Args:
        state_dir: has ``parquet/``.
        clock: for what is past.
        piece_rows: rows that are merged at a time.
        open_at_most_s: the longest life of an attempt.
        loose_files: hours are merged when so many files of them are not.

    Raises:
        manifests.ManifestDamaged: nothing was touched.
    """
    folder = state_dir / "parquet"
    folder.mkdir(parents=True, exist_ok=True)
    with ship.lock(folder) as ours:
        if not ours:
            return Compacted(busy=True)
        current = ship.settled(folder, clock)
        done = Compacted()
        today = schema.day_of(max(0, clock.wall_us() - round(open_at_most_s * 1e6)))
        over_us = clock.wall_us() - HOUR_SETTLES_US
        groups: dict[tuple[str, str], list[manifests.File]] = {}
        for each in current.files:
            groups.setdefault((each.table, each.day), []).append(each)
        for (table, day), files in sorted(groups.items()):
            if table not in schema.TABLES:
                continue  # of a later release
            try:
                work = _day(files) if day < today else _hours(folder, files, over_us, loose_files)
                _check(folder, () if work is None else work.files)
                if work is None:
                    continue
                made, given_up = _written(state_dir, work, piece_rows, current.generation + 1)
            except (_Damaged, *_NOT_MERGED) as error:  # the other days go on
                what = "damaged or gone" if isinstance(error, _Damaged) else f"{table} of {day}"
                why = f"{folder}: {what}, not compacted: {str(error).partition(chr(10))[0]}"
                done = dataclasses.replace(done, problems=(*done.problems, why))
                continue
            current = _swap(folder, current, work.files, made, clock)
            before = sum(each.rows for each in work.files)
            done = dataclasses.replace(
                done,
                files_before=done.files_before + len(work.files),
                files_after=done.files_after + len(made),
                repeated_rows=done.repeated_rows + before - sum(each.rows for each in made),
                given_up=done.given_up + given_up,
            )
        return done


def _check(folder: Path, files: Sequence[manifests.File]) -> None:
    bad = [each.path for each in files if not _whole(folder, each)]
    if bad:
        raise _Damaged(", ".join(bad))


def _whole(folder: Path, file: manifests.File) -> bool:
    try:
        return manifests.digest(folder / file.path) == file.sha256
    except FileNotFoundError:
        return False


def _day(files: Sequence[manifests.File]) -> _Work | None:
    """Return what a day's files become: one, in which attempts that nobody ended are given up."""
    first, *more = files
    unmerged = first.table == schema.USAGE and (not first.merged or first.hour != manifests.DAY)
    return _Work(files, [pieces.Part(over=True)]) if more or unmerged else None


def _hours(
    folder: Path, files: Sequence[manifests.File], over_us: int, loose_files: int
) -> _Work | None:
    """Return what loose files become: a file for each hour that is over, one for what comes after.

    Args:
        folder: of the Parquet files.
        files: of one table and day.
        over_us: an hour that ended before this is over, UTC µs.
        loose_files: with fewer of them nothing is done.
    """
    until = over_us // rollup.HOUR_US * rollup.HOUR_US
    loose = [
        each
        for each in files
        if each.hour == manifests.DAY and not each.merged and each.first_us < until
    ]
    if len(loose) < max(1, loose_files):
        return None
    _check(folder, loose)
    begin = schema.begin_column(loose[0].table)
    hours: set[int] = set()
    for each in loose:
        column = pq.read_table(folder / each.path, columns=[begin])[begin]
        hours.update(pc.unique(pc.divide(column, rollup.HOUR_US)).to_pylist())
    over = sorted(hour for hour in hours if hour * rollup.HOUR_US < until)
    parts = [
        pieces.Part(hour * rollup.HOUR_US, (hour + 1) * rollup.HOUR_US, hour=hour % 24)
        for hour in over
    ]
    merged = [each for each in files if each.hour in {hour % 24 for hour in over}]
    return _Work([*loose, *merged], [*parts, pieces.Part(first_us=until, merged=False)])


def _written(
    state_dir: Path, work: _Work, piece_rows: int, generation: int
) -> tuple[list[manifests.File], int]:
    """Write the parts; returns their files and how many attempts were given up."""
    merging = pieces.Merging(state_dir, work.files, piece_rows)
    made: list[manifests.File] = []
    try:
        over = work.files[0].table == schema.USAGE and any(part.over for part in work.parts)
        lost = merging.lost() if over else 0
        for part in work.parts:
            if (file := merging.write(part)) is not None:
                made.append(file)
    except BaseException:  # a full disk: the parts that fitted must not stay and fill it
        for each in made:
            (state_dir / "parquet" / each.path).unlink(missing_ok=True)
        raise
    finally:
        merging.close()
    if lost:  # rollups must look at the day again
        made = [dataclasses.replace(each, since=generation) for each in made]
    return made, lost


def _swap(
    folder: Path,
    current: manifests.Manifest,
    old: Sequence[manifests.File],
    new: Sequence[manifests.File],
    clock: clocks.Clock,
) -> manifests.Manifest:
    gone = {each.path for each in old}
    fresh = dataclasses.replace(
        current,
        generation=current.generation + 1,
        files=(*(each for each in current.files if each.path not in gone), *new),
        retired={**current.retired, **dict.fromkeys(gone, clock.wall_us())},
    )
    manifests.save(folder, fresh)
    return fresh
