"""How rows of a day are merged and written anew: a piece at a time, so that any day takes the same memory."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from accounting import books, columns, merge, owner_runs, rollup, schema, ship
from accounting import manifest as manifests
from scheduler.contracts import ids

ROWS = 500_000  # as written; about 250 MB while they are merged
# Who pays for what, then time: attempts of one owner stand in a row in each piece (`accounting.runs`).
ORDER = (*owner_runs.KEYS, "request_id", "attempt")
_GROUP_ROWS = 262_144  # a merged piece is one or two: each costs a reader some 50 µs a column
_MEMORY_MB = 512
_GIVEN_UP = f"""
SELECT * REPLACE (
  CASE WHEN outcome = 'open' THEN 'error' ELSE outcome END AS outcome,
  CASE WHEN outcome = 'open' THEN greatest(arrived_us, started_us) ELSE ended_us END AS ended_us,
  CASE WHEN outcome = 'open' THEN 'platform' ELSE payer END AS payer,
  CASE WHEN outcome = 'open' THEN '{ship.LOST}' ELSE reason END AS reason
) FROM"""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What becomes one file: the rows that begin in ``[first_us, last_us)``.

    Attributes:
        hour: the UTC hour of the day that it holds, `manifest.DAY` if it is no hour's.
        merged: each attempt has one row in it and none in another merged file.
        over: nobody can be at an attempt any more of which only OPEN is known: it is given up.
    """

    first_us: int = 0
    last_us: int = books.MAX_US
    hour: int = manifests.DAY
    merged: bool = True
    over: bool = False


class Merging:
    """A session over some files of one table and day, which are written anew in parts.

    Args:
        state_dir: Forebay's state folder.
        files: of the manifest; of one table and day.
        piece_rows: rows, as written, that are merged at a time.
    """

    def __init__(self, state_dir: Path, files: Sequence[manifests.File], piece_rows: int) -> None:
        self._folder = state_dir / "parquet"
        self._files = files
        self._table, self._day = files[0].table, files[0].day
        self._piece_rows = piece_rows
        scratch = str(state_dir / "scratch")
        config: dict[str, Any] = {"memory_limit": f"{_MEMORY_MB}MB", "temp_directory": scratch}
        self._session = duckdb.connect(":memory:", config=config)
        paths = [str(self._folder / each.path) for each in files]
        rows = books.stored(self._session, self._table, "files", paths)
        self._session.execute(f"CREATE VIEW raw AS {rows}")

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def lost(self) -> int:
        """Return how many attempts there are of which nothing but OPEN is known."""
        text = (
            "SELECT count(*) FROM (SELECT request_id, attempt FROM raw GROUP BY ALL "
            "HAVING max(kind) = 'open' AND min(kind) = 'open' AND max(outcome) = 'open')"
        )
        return int(self._session.execute(text).fetchall()[0][0])

    def write(self, part: Part) -> manifests.File | None:
        """Write a part's file durably; None if there is no row in it."""
        begin = schema.begin_column(self._table)
        inside = f"{begin} >= {part.first_us} AND {begin} < {part.last_us}"
        text = f"SELECT count(*) FROM raw WHERE {inside}"  # noqa: S608 - numbers, here and below
        ((rows,),) = self._session.execute(text).fetchall()
        if not rows:
            return None
        merged = self._table == schema.USAGE
        pieces = self._usage(part, inside, rows) if merged else self._intervals(inside)
        made = write(self._folder, self._table, self._day, pieces)
        # Of files that may have rows of the part alone: rollups need not look at a quiet hour again.
        since = max(
            each.since
            for each in self._files
            if each.first_us < part.last_us and each.last_us >= part.first_us
        )
        return dataclasses.replace(made, since=since, merged=merged and part.merged, hour=part.hour)

    def _intervals(self, inside: str) -> Iterator[Any]:
        key = "run" if self._table == schema.GPU else "replica_id"
        yield self._session.sql(
            f"SELECT * FROM raw WHERE {inside} QUALIFY "  # noqa: S608 - numbers and column names of ours
            f"row_number() OVER (PARTITION BY cluster, lease_id, {key}, seq "
            "ORDER BY end_us DESC, start_us, gpus DESC) = 1 "
            "ORDER BY start_us, lease_id, seq"
        )

    def _usage(self, part: Part, inside: str, rows: int) -> Iterator[Any]:
        shares = [n * self._piece_rows / rows for n in range(1, -(-rows // self._piece_rows))]
        cuts: list[int] = []
        if shares:
            text = f"SELECT approx_quantile(arrived_us, {shares}) FROM raw WHERE {inside}"  # noqa: S608
            ((cuts,),) = self._session.execute(text).fetchall()
        within = set(cuts) - {0}
        borders = [part.first_us, *sorted(within - {part.first_us, part.last_us}), part.last_us]
        chosen = _GIVEN_UP if part.over else "SELECT * FROM"
        statement = f"{chosen} ({merge.statement('piece')}) ORDER BY {rollup.quoted(ORDER)}"
        for first, last in itertools.pairwise(borders):
            self._session.execute(
                f"CREATE OR REPLACE TEMP TABLE piece AS SELECT * FROM raw "  # noqa: S608 - numbers
                f"WHERE arrived_us >= {first} AND arrived_us < {last}"
            )
            yield self._session.sql(statement)


def write(folder: Path, table: str, day: str, pieces: Iterator[Any]) -> manifests.File:
    """Stream pieces, of one row at least, into one file, durably; returns its entry.

    Raises:
        owner_runs.Damaged: what was written can't be trusted, and is gone again.
    """
    path = ship.partition(folder, table, day) / f"{ids.uuid7()}.parquet"
    with manifests.writing(path) as stream:
        rows, spans = _streamed(stream, table, pieces)
    if table == schema.USAGE:
        try:
            owner_runs.check(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return manifests.File(
        path=str(path.relative_to(folder)),
        table=table,
        day=day,
        rows=rows,
        bytes=path.stat().st_size,
        sha256=manifests.digest(path),
        first_us=min(first for first, _ in spans),
        last_us=max(last for _, last in spans),
    )


def _streamed(
    stream: BinaryIO, table: str, pieces: Iterator[Any]
) -> tuple[int, list[tuple[int, int]]]:
    """Write pieces as Parquet, and who owns which rows of `usage`; returns how many and their spans."""
    wanted = schema.schema(table)
    rows = 0
    spans: list[tuple[int, int]] = []
    owned: list[owner_runs.Runs] = []
    with pq.ParquetWriter(stream, wanted, **schema.layout(table)) as writer:
        for piece in pieces:
            for batch in piece.to_arrow_reader(_GROUP_ROWS):
                if not batch.num_rows:
                    continue
                rows += batch.num_rows
                group = pa.Table.from_batches([batch]).select(wanted.names).cast(wanted)
                spans.append(columns.span(table, group))
                writer.write_table(group, row_group_size=_GROUP_ROWS)
                if table == schema.USAGE:
                    owned.append(owner_runs.found(group, owner_runs.KEYS, {}))
        if owned:
            writer.add_key_value_metadata(owner_runs.kept(owned))
    return rows, spans
