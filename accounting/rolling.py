"""The pass that keeps the rollups: each row counted once, however often it runs and wherever it is killed.

A period's sums are never added to. A day of the manifest that has rows newer than those applied is looked
at again: the minutes which such rows touch are summed anew from merged rows (`books`), their hours anew
from minutes, their days from hours, and all of it replaces what was there in one transaction, together
with the generation that is now applied. So late rows make a revision; a pass that is killed, or meets
another one, leaves the old figures or the new ones. Minutes older than some days are not kept: a late row
there has its whole hour summed from the rows.
"""

import bisect
import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from accounting import books, demand, revisions, rollup, schema
from accounting import manifest as manifests
from scheduler.contracts import clock as clocks

MINUTES_KEPT_S = 2 * 86_400.0
_LEFT_S = 86_400.0  # no reading or pass runs as long: older files in scratch/ are of killed ones
_NOT_ITS_FAULT = ("No space left", "Permission denied", "Read-only file system")
_COLUMNS = (
    *rollup.KEYS,
    "attempt",
    "outcome",
    "uncached_prompt_tokens",
    "cached_prompt_tokens",
    "output_tokens",
    "waste_tokens",
    "arrived_us",
    "first_token_us",
    "ended_us",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Rolled:
    """What a pass did: days and minutes that were summed anew, and a line for each thing in the way."""

    days: int = 0
    minutes: int = 0
    problems: tuple[str, ...] = ()


def roll(
    records: books.Books,
    clock: clocks.Clock,
    *,
    minutes_kept_s: float = MINUTES_KEPT_S,
    path: Path | None = None,
) -> Rolled:
    """Bring the rollups up to the manifest. Blocks; safe to kill, to repeat and to run beside itself.

    Args:
        records: what is summed.
        clock: for what is late and which minutes are kept.
        minutes_kept_s: age up to which minutes are kept.
        path: the file; that of the state folder if not given.

    Raises:
        manifests.ManifestDamaged: nothing was touched.
    """
    try:
        return _roll(records, clock, minutes_kept_s, path)
    except rollup.Busy as error:  # the next pass does what this one did not
        return Rolled(problems=(str(error),))


def _roll(
    records: books.Books, clock: clocks.Clock, minutes_kept_s: float, path: Path | None
) -> Rolled:
    target = path or rollup.path_of(records.state_dir)
    current = manifests.load(records.state_dir / "parquet") or manifests.Manifest()
    groups: dict[str, list[manifests.File]] = {}
    for each in current.files:
        if each.table == schema.USAGE:
            groups.setdefault(each.day, []).append(each)
    applied, floor_us, problems = _begin(target, clock, minutes_kept_s, current.generation)
    days = minutes = 0
    for day, files in sorted(groups.items()):
        newest = max(each.since for each in files)
        before = applied.get(day, -1)
        if newest <= before:
            continue
        try:
            faults = [fault for fault in map(records.fault, files) if fault]
            if faults:  # what was summed when the file was whole is better than a sum without it
                problems += [*faults, f"{target}: {day} is not summed anew until that is mended"]
                continue
            with _scratch(records.state_dir) as sums:
                part = _sum(records, day, files, before, floor_us, sums)
                if revisions.apply(target, part, clock.wall_us()):
                    days += 1
                    minutes += len(part.minutes) + 60 * len(part.hours)
        except books.Moved:
            continue  # compacted meanwhile: the next pass sees it
        except (duckdb.Error, ValueError, ArithmeticError) as error:
            if any(word in str(error) for word in _NOT_ITS_FAULT):
                raise
            first = str(error).partition("\n")[0]  # the other days go on
            problems.append(f"{target}: {day} can't be summed, it keeps its old sums: {first}")
    if days:
        revisions.forget(target, floor_us, clock.wall_us())
    return Rolled(days, minutes, tuple(problems))


def rebuild(
    records: books.Books, clock: clocks.Clock, *, minutes_kept_s: float = MINUTES_KEPT_S
) -> Rolled:
    """Make the rollups again from Parquet, and put them in the place of the old ones.

    Readers see the old ones until then. A leader that rolls up meanwhile does no harm: what it applied
    to the old file is applied to the new one by its next pass.

    Raises:
        manifests.ManifestDamaged: the old ones are left.
    """
    target = rollup.path_of(records.state_dir)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    _remove(fresh)
    try:
        done = roll(records, clock, minutes_kept_s=minutes_kept_s, path=fresh)
        _log_of(target).unlink(missing_ok=True)  # it belongs to the old file
        fresh.replace(target)
        manifests.sync_folder(target.parent)
    finally:
        _remove(fresh)
    return done


@contextlib.contextmanager
def _scratch(state_dir: Path) -> Iterator[Path]:
    """Name a file for a part's sums, and remove it; what killed passes and readings left goes too."""
    folder = state_dir / "scratch"
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()
    path = folder / f"sums-{uuid.uuid4().hex}.duckdb"
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _log_of(path).unlink(missing_ok=True)


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.wal")


def _begin(
    target: Path, clock: clocks.Clock, kept_s: float, generation: int
) -> tuple[dict[str, int], int, list[str]]:
    """Return what is applied, the first minute that is kept, and a line if the file had to be replaced."""
    problems: list[str] = []
    floor_us = (clock.wall_us() - round(kept_s * 1e6)) // rollup.HOUR_US * rollup.HOUR_US
    try:
        applied, stored_us = _known(target)
    except duckdb.Error as error:
        if any(word in str(error) for word in _NOT_ITS_FAULT):
            raise
        aside = target.with_name(f"{target.name}.damaged")
        problems.append(f"{target}: damaged ({error}): kept as {aside}, made again from Parquet")
        _set_aside(target, aside)
        applied, stored_us = _known(target)
    if max(applied.values(), default=0) > generation:
        problems.append(f"{target}: newer than the manifest: made again from Parquet")
        _remove(target)
        applied, stored_us = _known(target)
    return applied, max(floor_us, stored_us), problems


def _set_aside(target: Path, aside: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)
    _log_of(target).unlink(missing_ok=True)


def _known(target: Path) -> tuple[dict[str, int], int]:
    made = not target.exists()
    try:
        with rollup.opened(target, write=True) as session:
            rollup.create(session)
            demand.create(session)
            applied = dict(session.execute("SELECT day, generation FROM applied").fetchall())
            floor_us = revisions.number(
                session, "SELECT value FROM facts WHERE name = 'minutes_from'", 0
            )
    except duckdb.Error:
        if made:  # a full disk leaves a file that looks damaged
            _remove(target)
        raise
    return applied, floor_us


def _sum(
    records: books.Books,
    day: str,
    files: Sequence[manifests.File],
    before: int,
    floor_us: int,
    sums: Path,
) -> revisions.Part:
    """Sum anew, into file ``sums``, what rows that are newer than generation ``before`` touch."""
    starts = _touched(records, [each for each in files if each.since > before])
    minutes = tuple(us for us in starts if us >= floor_us)
    hours = tuple(sorted({revisions.hour_of(us) for us in starts if us < floor_us}))
    # A day is a file a minute until it is compacted, and all rows of an attempt have one arrival.
    ends = {us: us + rollup.MINUTE_US for us in minutes} | {us: us + rollup.HOUR_US for us in hours}
    with records.over(_overlapping(files, ends)) as session:
        session.execute(f"ATTACH {revisions.literal(sums)} AS sums")
        _sums(session, "minutes", minutes)
        _sums(session, "hours", hours)
        session.execute("DETACH sums")
    return revisions.Part(day, before, max(each.since for each in files), minutes, hours, sums)


def _touched(records: books.Books, files: Sequence[manifests.File]) -> list[int]:
    """Return the begins of the minutes in which something of ``files`` arrived, ascending."""
    with records.over(files) as session:
        rows = session.execute(
            f"SELECT DISTINCT arrived_us // {rollup.MINUTE_US} AS m FROM usage_rows ORDER BY m"  # noqa: S608 - a number
        ).fetchall()
    return [minute * rollup.MINUTE_US for (minute,) in rows]


def _overlapping(files: Sequence[manifests.File], ends: Mapping[int, int]) -> list[manifests.File]:
    """Return the files that may have rows of the periods ``ends``, begin to end."""
    begins = sorted(ends)
    found = []
    for each in files:
        place = bisect.bisect_right(begins, each.last_us)  # the last that begins before its end
        if place and ends[begins[place - 1]] > each.first_us:
            found.append(each)
    return found


def _sums(session: Any, level: str, periods: Sequence[int]) -> None:
    if not periods:
        return
    length = rollup.LEVELS[level]
    session.register("wanted", pa.table({"period_us": pa.array(periods, pa.int64())}))
    names = rollup.quoted(_COLUMNS)
    session.execute(
        f"CREATE OR REPLACE TEMP TABLE part AS SELECT {names} FROM usage "  # noqa: S608 - names, numbers
        f"WHERE arrived_us >= {periods[0]} AND arrived_us < {periods[-1] + length} "
        f"AND arrived_us // {length} * {length} IN (SELECT period_us FROM wanted)"
    )
    for family, statement in (("usage", rollup.usage_of), ("latency", rollup.latency_of)):
        session.execute(f"CREATE TABLE sums.{family}_{level} AS {statement('part', length)}")
    session.execute("DROP TABLE part")
