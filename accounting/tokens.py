"""Tokens that teams pay for, by owner, summed from the records where rollups do not say it.

Two ways to the same sums. A compacted day, whose file holds each attempt once, is added up as it lies
(`accounting.runs`). Everything else is merged and summed by SQL: today, days to which rows came since,
files of releases that knew fewer columns, and numbers whose sum might not fit into 64 bits.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import NamedTuple

import duckdb
import pyarrow as pa

from accounting import books, manifest, owner_runs, runs, schema

_THREADS = 2
_ATTEMPTS = 5
_STATEMENT = """
SELECT span, {keys}, {sums} FROM usage JOIN spans ON arrived_us >= span_start AND arrived_us < span_end
WHERE payer = 'team' GROUP BY span, {keys}"""


class Sum(NamedTuple):
    """What one owner used and pays for in one span.

    Attributes:
        span: which of those that were asked for.
        keys: values of the keys that were asked for.
    """

    span: int
    keys: tuple[str, ...]
    uncached_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The sums, in no order, and a line for each thing that could not be read."""

    sums: Sequence[Sum]
    problems: tuple[str, ...]


def take(records: books.Books, spans: Sequence[tuple[int, int]], keys: tuple[str, ...]) -> Found:
    """Sum what teams pay for, by the span of time in which it arrived; blocks.

    Args:
        records: what is summed.
        spans: for each of them sums of its own; UTC µs, ends not included, ascending and disjoint.
        keys: text columns of the usage record that tell the sums apart.

    Raises:
        manifest.ManifestDamaged: nothing can be said.
    """
    wanted = runs.Wanted(keys, spans)
    for _ in range(_ATTEMPTS):
        try:
            return _take(records, wanted)
        except (books.Moved, FileNotFoundError):
            continue  # compacted since the manifest was read
    raise manifest.ManifestDamaged(
        f"{records.state_dir}: files that the manifest names are missing: restore them from a backup"
    )


def _take(records: books.Books, wanted: runs.Wanted) -> Found:
    snapshot = records.snapshot(wanted.spans[0][0], wanted.spans[-1][1])
    touched = [each for each in snapshot.files[schema.USAGE] if _touches(each, wanted.spans)]
    plain, others = books.parted(touched, snapshot.live[schema.USAGE])
    added = _added(records, plain, wanted)
    asked = _asked(records, snapshot, added.unfit + others, wanted)
    found: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for span, keys, amounts in itertools.chain(added.rows, asked):
        before = found.get((span, keys))
        found[span, keys] = (
            amounts if before is None else [a + b for a, b in zip(before, amounts, strict=True)]
        )
    sums = [Sum(*key, *amounts) for key, amounts in found.items()]
    return Found(sums, (*snapshot.problems, *added.problems))


_Row = tuple[int, tuple[str, ...], list[int]]


def _touches(file: manifest.File, spans: Sequence[tuple[int, int]]) -> bool:
    return any(not schema.lies_outside(file.day, first, last) for first, last in spans)


class _Added(NamedTuple):
    """What was added up as it lies, the files that can't be, and those that are not to be trusted."""

    rows: list[_Row]
    unfit: list[manifest.File]
    problems: list[str]


def _added(records: books.Books, files: Sequence[manifest.File], wanted: runs.Wanted) -> _Added:
    def one(file: manifest.File) -> runs.Summed | owner_runs.Damaged | None:
        inside = (n for n, span in enumerate(wanted.spans) if schema.lies_within(file.day, *span))
        try:
            where = next(inside, None)
            return runs.of_file(records.path(file), wanted, where, records.footers, file.sha256)
        except owner_runs.Damaged as error:
            return error

    with futures.ThreadPoolExecutor(_THREADS) as pool:
        made = list(zip(files, pool.map(one, files), strict=True))
    fit = [each for _, each in made if isinstance(each, runs.Summed)]
    groups = [each.parts for each in fit]
    if sum(each.most for each in fit) <= runs.MOST:
        groups = [[part for each in fit for part in each.parts]]
    tables = [runs.added_up(parts, wanted.keys) for parts in groups]
    return _Added(
        [row for table in tables for row in runs.rows_of(table, wanted.keys)],
        [file for file, each in made if each is None],
        [
            f"{records.path(file)}: {each}: {file.rows} {file.table} rows of {file.day} are not counted; "
            "restore the file from a backup"
            for file, each in made
            if isinstance(each, owner_runs.Damaged)
        ],
    )


def _asked(
    records: books.Books,
    snapshot: books.Snapshot,
    files: Sequence[manifest.File],
    wanted: runs.Wanted,
) -> Iterator[_Row]:
    live = snapshot.live[schema.USAGE]
    if not files and not live.num_rows:
        return
    rest = dataclasses.replace(snapshot, files={**snapshot.files, schema.USAGE: files})
    starts, ends = zip(*wanted.spans, strict=True)
    spans = {"span": range(len(starts)), "span_start": starts, "span_end": ends}
    table = pa.table({name: pa.array(column, pa.int64()) for name, column in spans.items()})
    keys = ", ".join(f'"{name}"' for name in wanted.keys)
    sums = ", ".join(f"sum({name})" for name in runs.SUMS)
    with records.opened(rest, starts[0], ends[-1]) as session:
        session.register("spans", table)
        try:
            rows = session.execute(_STATEMENT.format(keys=keys, sums=sums)).fetchall()
        except duckdb.IOException as error:  # it opens files when it comes to them
            if all(records.path(each).exists() for each in files):
                raise
            raise books.Moved from error
    count = 1 + len(wanted.keys)
    for row in rows:
        yield row[0], row[1:count], [int(each) for each in row[count:]]
