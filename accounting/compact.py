"""Many small files of a past day become one, without the rows that a take-over wrote twice.

The same swap as the shipper's: the new file is written, the manifest names it instead of the old ones,
and those are unlinked a quarter of an hour later, when no reading can still want them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from accounting import manifest as manifests
from accounting import schema, ship
from scheduler.contracts import clock as clocks

LARGEST_BYTES = 256 * 1024 * 1024  # compressed; about 1 GB in memory


@dataclasses.dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did; `busy` if another process writes in the folder now."""

    files_before: int = 0
    files_after: int = 0
    repeated_rows: int = 0
    problems: tuple[str, ...] = ()
    busy: bool = False


def compact(
    state_dir: Path, clock: clocks.Clock, *, largest_bytes: int = LARGEST_BYTES
) -> Compacted:
    """Merge the files of each past UTC day and table. Blocks; safe to kill and to repeat.

    A day with a damaged file, or with more than ``largest_bytes``, is left as it is.

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
        today = schema.day_of(clock.wall_us())
        groups: dict[tuple[str, str], list[manifests.File]] = {}
        for each in current.files:
            groups.setdefault((each.table, each.day), []).append(each)
        for (_, day), files in sorted(groups.items()):
            if day >= today or len(files) < 2 or sum(each.bytes for each in files) > largest_bytes:
                continue
            bad = [each.path for each in files if not _whole(folder, each)]
            if bad:
                why = f"{folder}: damaged or gone, not compacted: {', '.join(bad)}"
                done = dataclasses.replace(done, problems=(*done.problems, why))
                continue
            merged = _merge(folder, files)
            current = _swap(folder, current, files, merged, clock)
            done = dataclasses.replace(
                done,
                files_before=done.files_before + len(files),
                files_after=done.files_after + 1,
                repeated_rows=done.repeated_rows + sum(each.rows for each in files) - merged.rows,
            )
        return done


def _whole(folder: Path, file: manifests.File) -> bool:
    try:
        return manifests.digest(folder / file.path) == file.sha256
    except FileNotFoundError:
        return False


def _merge(folder: Path, files: Sequence[manifests.File]) -> manifests.File:
    table, day = files[0].table, files[0].day
    wanted = schema.schema(table)
    everything = pa.concat_tables(
        [pq.read_table(folder / each.path, schema=wanted) for each in files]
    )
    once = everything.group_by(wanted.names, use_threads=False).aggregate([])  # equal rows: one
    order = "arrived_us" if table == schema.USAGE else "start_us"
    once = once.select(wanted.names).sort_by([(order, "ascending")]).cast(wanted)
    span = min(each.first_us for each in files), max(each.last_us for each in files)
    return ship.write_file(folder, table, day, once, span)


def _swap(
    folder: Path,
    current: manifests.Manifest,
    old: Sequence[manifests.File],
    new: manifests.File,
    clock: clocks.Clock,
) -> manifests.Manifest:
    gone = {each.path for each in old}
    fresh = dataclasses.replace(
        current,
        generation=current.generation + 1,
        files=(*(each for each in current.files if each.path not in gone), new),
        retired={**current.retired, **dict.fromkeys(gone, clock.wall_us())},
    )
    manifests.save(folder, fresh)
    return fresh
