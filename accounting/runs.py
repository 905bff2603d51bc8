"""Sums over a compacted file without SQL: numbers are read and added up run by run.

A compaction sorts the attempts of each piece of a day by who pays for what (`pieces.ORDER`), so that those
with one owner stand in a row, and keeps in the file how many do (`owner_runs`). Between two borders of these
runs numbers are added up as they lie in memory. In a file of a release that kept no runs the borders are
found from the dictionary codes of the key columns; a column that has one value in a row group, as its
statistics say, is not read there. Every row's numbers are read each time, nothing is summed beforehand: any
window, price list or set of keys is served alike. The order makes it quick and not right: a file in any
order has the same sums, in shorter runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from accounting import footers, owner_runs
from scheduler.contracts import usage

SUMS = ("uncached_prompt_tokens", "cached_prompt_tokens", "output_tokens")
SPAN = "span"
MOST = 2**63 - 1
_AT_ONCE = 16  # parts that are kept before they are added up
_ARRIVED = "arrived_us"
_PAYER = "payer"
_TEAM = usage.Payer.TEAM.value


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of every file.

    Attributes:
        keys: text columns by which the sums are told apart; files of every release have them.
        spans: from, up to and not including, UTC µs; ascending and disjoint. A request counts in the
            span in which it arrived.
    """

    keys: tuple[str, ...]
    spans: Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """The sums of what teams pay for in one file.

    Attributes:
        parts: tables of the keys, `SPAN` and `SUMS`; keys may be in several of them.
        most: no sum over all parts is larger.
    """

    parts: Sequence[Any]
    most: int


def of_file(
    path: Path, wanted: Wanted, span: int | None, kept: footers.Footers, sha256: str
) -> Summed | None:
    """Return the sums of one file; None if it does not say that they fit into 64 bits.

    Args:
        path: of the file.
        wanted: what is asked.
        span: in which of the spans every row of the file arrived, None if that has to be looked at.
        kept: what is known of files already.
        sha256: of the file, by which it is known.

    Raises:
        OSError: it can't be read.
        owner_runs.Damaged: the runs that it keeps are not those of its rows.
    """
    texts = tuple(dict.fromkeys((*wanted.keys, _PAYER)))
    footer = kept.get((sha256, texts))
    with (
        pa.OSFile(str(path)) as source,
        # A read in one thread waits for nobody, where reading ahead goes through a pool of others.
        pq.ParquetFile(
            source,
            metadata=None if footer is None else footer.about,
            read_dictionary=list(texts),
            pre_buffer=False,
        ) as file,
    ):
        if footer is None:
            footer = _footer(file.metadata, texts)
            kept.put((sha256, texts), footer)
        return _summed_up(file, footer, wanted, span, texts)


def _footer(about: Any, texts: Sequence[str]) -> footers.Footer:
    place = {name: number for number, name in enumerate(about.schema.names)}
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    its = owner_runs.stored(about, texts)
    return footers.Footer(
        about,
        None if its is None else [each.joined() for each in its],
        [_largest(group, place) for group in groups],
    )


def _summed_up(
    file: Any, footer: footers.Footer, wanted: Wanted, span: int | None, texts: Sequence[str]
) -> Summed | None:
    parts: list[Any] = []
    most = 0
    for number, largest in enumerate(footer.largest):
        group = footer.about.row_group(number)
        if largest is None or (most := most + group.num_rows * largest) > MOST:
            return None
        if not group.num_rows:
            continue
        its = _found(file, number, texts) if footer.its is None else footer.its[number]
        if its is None:
            continue
        parts.append(_summed(functools.partial(_numbers, file, number), its, wanted, span))
        if len(parts) == _AT_ONCE:
            parts = [added_up(parts, wanted.keys)]
    return Summed(parts, most)


def _found(file: Any, number: int, texts: Sequence[str]) -> owner_runs.Runs | None:
    """Find a row group's runs in its columns of texts; None if nothing in it is a team's to pay."""
    about = file.metadata
    place = {name: column for column, name in enumerate(about.schema.names)}
    same = _same(about.row_group(number), place, texts)
    if same.get(_PAYER, _TEAM) != _TEAM:
        return None
    read = [name for name in texts if name not in same] or [_PAYER]
    rows = file.read_row_group(number, columns=read, use_threads=False)
    return owner_runs.found(rows, texts, same)


def _largest(group: Any, place: Mapping[str, int]) -> int | None:
    """Return a bound on any summed number of a row group, at least 1; None where it has none."""
    largest = 1
    for name in SUMS:
        found = group.column(place[name]).statistics
        if found is None or not found.has_min_max or found.null_count:
            return None
        largest = max(largest, abs(found.min), abs(found.max))
    return largest


def _same(group: Any, place: Mapping[str, int], texts: Sequence[str]) -> dict[str, str]:
    """Return the columns that have one value in all rows of a row group, and that value."""
    same = {}
    for name in texts:
        found = group.column(place[name]).statistics
        if found is not None and found.has_min_max and found.null_count == 0:
            least = found.min
            if isinstance(least, str) and least == found.max:
                same[name] = least
    return same


def added_up(parts: Sequence[Any], keys: Sequence[str]) -> Any:
    """Add up equal keys of several tables; their sums must fit into 64 bits."""
    if not parts:
        names = [*keys, SPAN, *SUMS]
        return pa.table(
            {name: pa.array([], pa.string() if name in keys else pa.int64()) for name in names}
        )
    joined = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    by = [SPAN, *keys]
    found = joined.group_by(by, use_threads=False).aggregate([(name, "sum") for name in SUMS])
    return found.rename_columns([*by, *SUMS]).select([*keys, SPAN, *SUMS])  # as the parts are


def _summed(
    read: Callable[[str], Any], its: owner_runs.Runs, wanted: Wanted, span: int | None
) -> Any:
    """Return the sums of some rows.

    Args:
        read: returns a column of numbers. One at a time: they are added up while the cache has them.
        its: the runs of these rows, by the keys and the payer.
        wanted: what is asked.
        span: in which they all arrived, None if that has to be looked at.
    """
    if span is None:
        arrived = _span_of(read(_ARRIVED), wanted.spans)
        its = its.cut(1 + np.flatnonzero(arrived[1:] != arrived[:-1]))
        spans = arrived[its.begins]
    else:
        spans = np.full(len(its.begins), span)
    payers, words = its.owners[_PAYER]
    counted = (payers == pc.index(words, _TEAM).as_py()) & (spans >= 0)
    found = {}
    for name in wanted.keys:
        codes, words = its.owners[name]
        found[name] = pa.DictionaryArray.from_arrays(codes[counted].astype(np.int32), words)
    found[SPAN] = pa.array(spans[counted], pa.int64())
    for name in SUMS:
        found[name] = pa.array(np.add.reduceat(read(name), its.begins)[counted])
    return pa.table(found)


def _span_of(arrived: Any, spans: Sequence[tuple[int, int]]) -> Any:
    """Return the number of the span in which each row arrived, -1 for none."""
    begins, ends = (np.array(each, np.int64) for each in zip(*spans, strict=True))
    place = np.searchsorted(begins, arrived, side="right") - 1
    return np.where((place >= 0) & (arrived < ends[place]), place, -1)


def _numbers(file: Any, group: int, name: str) -> Any:
    column = file.read_row_group(group, columns=[name], use_threads=False)[name]
    return column.chunk(0).to_numpy() if column.num_chunks == 1 else column.to_numpy()


def rows_of(table: Any, keys: Sequence[str]) -> list[tuple[int, tuple[str, ...], list[int]]]:
    """Return a table of sums as span, keys and sums; one text object for each word of a dictionary."""
    spans = table[SPAN].to_numpy().tolist()
    words = []
    for name in keys:
        column = table[name].combine_chunks()
        column = column.dictionary_encode() if pa.types.is_string(column.type) else column
        known = column.dictionary.to_pylist()
        words.append([known[code] for code in column.indices.to_numpy().tolist()])
    sums = [table[name].to_numpy().tolist() for name in SUMS]
    by = zip(*words, strict=True) if words else [()] * len(spans)
    return list(zip(spans, by, map(list, zip(*sums, strict=True)), strict=True))
