"""Past days become few files: one row for each attempt, sorted, so that a reader has nothing to merge.

The rows of a day of `usage` are merged (`accounting.merge`) in pieces of the day, since all rows of one
request have the same arrival; so a day of any size takes the same memory. The same swap as the shipper's:
new files are written, the manifest names them instead of the old ones, and those are unlinked a quarter
of an hour later, when no reading can still want them. A row that comes in later lies beside the merged
file until the next pass merges the day again.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from accounting import books, merge, schema, ship
from accounting import manifest as manifests
from scheduler.contracts import clock as clocks
from scheduler.contracts import ids

PIECE_ROWS = 500_000  # as written; about 250 MB while they are merged
OPEN_AT_MOST_S = 6 * 3600.0
_GROUP_ROWS = 131_072
_MEMORY_MB = 512


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


def compact(
    state_dir: Path,
    clock: clocks.Clock,
    *,
    piece_rows: int = PIECE_ROWS,
    open_at_most_s: float = OPEN_AT_MOST_S,
) -> Compacted:
    """Merge the files of each past UTC day and table. Blocks; safe to kill and to repeat.

    A day with a damaged file is left as it is. So is one that ended less than ``open_at_most_s`` ago:
    then an attempt of which nothing but OPEN is known has ended with its gateway, and is recorded as
    that: outcome ``error``, at nobody's cost. Should its replica's row come after all, that one counts.

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
        groups: dict[tuple[str, str], list[manifests.File]] = {}
        for each in current.files:
            groups.setdefault((each.table, each.day), []).append(each)
        for (table, day), files in sorted(groups.items()):
            if table not in schema.TABLES:
                continue  # of a later release
            wanted = not all(each.merged for each in files) if table == schema.USAGE else files[1:]
            if day >= today or not wanted:
                continue
            bad = [each.path for each in files if not _whole(folder, each)]
            if bad:
                why = f"{folder}: damaged or gone, not compacted: {', '.join(bad)}"
                done = dataclasses.replace(done, problems=(*done.problems, why))
                continue
            before = sum(each.rows for each in files)
            merged, given_up = _merge(state_dir, files, piece_rows, current.generation + 1)
            current = _swap(folder, current, files, merged, clock)
            done = dataclasses.replace(
                done,
                files_before=done.files_before + len(files),
                files_after=done.files_after + len(merged),
                repeated_rows=done.repeated_rows + before - sum(each.rows for each in merged),
                given_up=done.given_up + given_up,
            )
        return done


def _whole(folder: Path, file: manifests.File) -> bool:
    try:
        return manifests.digest(folder / file.path) == file.sha256
    except FileNotFoundError:
        return False


def _merge(
    state_dir: Path, files: Sequence[manifests.File], piece_rows: int, generation: int
) -> tuple[list[manifests.File], int]:
    """Write the day anew; returns the files and how many attempts were given up."""
    folder = state_dir / "parquet"
    table, day = files[0].table, files[0].day
    paths = [str(folder / each.path) for each in files]
    since = max(each.since for each in files)
    with _session(state_dir) as session:
        rows = books.stored(session, table, "files", paths)
        session.execute(f"CREATE VIEW raw AS {rows}")
        pieces, given_up = _pieces(session, table, sum(each.rows for each in files), piece_rows)
        if given_up:
            since = generation  # rollups must look at the day again
        merged = write_pieces(folder, table, day, pieces)
    span = min(each.first_us for each in files), max(each.last_us for each in files)
    entry = dataclasses.replace(
        merged, first_us=span[0], last_us=span[1], since=since, merged=table == schema.USAGE
    )
    return [entry], given_up


def _session(state_dir: Path) -> Any:
    scratch = str(state_dir / "scratch")
    return duckdb.connect(
        ":memory:", config={"memory_limit": f"{_MEMORY_MB}MB", "temp_directory": scratch}
    )


def _pieces(session: Any, table: str, rows: int, piece_rows: int) -> tuple[Iterator[Any], int]:
    """Return the merged rows as Arrow batches, piece by piece in order, and how many were given up."""
    if table != schema.USAGE:
        key = "run" if table == schema.GPU else "replica_id"
        text = (
            "SELECT * FROM raw QUALIFY row_number() OVER (PARTITION BY cluster, lease_id, "  # noqa: S608
            f"{key}, seq ORDER BY end_us DESC, start_us, gpus DESC) = 1 ORDER BY start_us, lease_id, seq"
        )
        return iter([session.sql(text)]), 0
    ((lost,),) = session.execute(
        "SELECT count(*) FROM (SELECT request_id, attempt FROM raw GROUP BY ALL "
        "HAVING max(kind) = 'open' AND min(kind) = 'open' AND max(outcome) = 'open')"
    ).fetchall()
    shares = [n * piece_rows / rows for n in range(1, -(-rows // piece_rows))]
    cuts: list[int] = []
    if shares:
        text = f"SELECT approx_quantile(arrived_us, {shares}) FROM raw"  # noqa: S608 - numbers
        ((cuts,),) = session.execute(text).fetchall()
    borders = [0, *sorted(set(cuts) - {0}), books.MAX_US]
    given_up = f"""
SELECT * REPLACE (
  CASE WHEN outcome = 'open' THEN 'error' ELSE outcome END AS outcome,
  CASE WHEN outcome = 'open' THEN greatest(arrived_us, started_us) ELSE ended_us END AS ended_us,
  CASE WHEN outcome = 'open' THEN 'platform' ELSE payer END AS payer,
  CASE WHEN outcome = 'open' THEN '{ship.LOST}' ELSE reason END AS reason
) FROM ({merge.statement("piece")}) ORDER BY request_id, attempt"""  # noqa: S608 - ours

    def each() -> Iterator[Any]:
        for first, last in itertools.pairwise(borders):
            session.execute(
                f"CREATE OR REPLACE TEMP TABLE piece AS SELECT * FROM raw "  # noqa: S608 - numbers
                f"WHERE arrived_us >= {first} AND arrived_us < {last}"
            )
            yield session.sql(given_up)

    return each(), int(lost)


def write_pieces(folder: Path, table: str, day: str, pieces: Iterator[Any]) -> manifests.File:
    """Stream the pieces into one file, durably; the entry has no span yet."""
    wanted = schema.schema(table)
    partition = ship.partition(folder, table, day)
    path = partition / f"{ids.uuid7()}.parquet"
    rows = 0
    with manifests.writing(path) as stream:
        writer = pq.ParquetWriter(stream, wanted, **schema.layout(table))
        with writer:
            for piece in pieces:
                for batch in piece.to_arrow_reader(_GROUP_ROWS):
                    rows += batch.num_rows
                    writer.write_table(
                        pa.Table.from_batches([batch]).select(wanted.names).cast(wanted),
                        row_group_size=_GROUP_ROWS,
                    )
    return manifests.File(
        path=str(path.relative_to(folder)),
        table=table,
        day=day,
        rows=rows,
        bytes=path.stat().st_size,
        sha256=manifests.digest(path),
        first_us=0,
        last_us=0,
    )


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
