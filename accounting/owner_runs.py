"""Where in a compacted file the rows of one owner stand: how many there are of each, run by run.

A compaction sorts attempts by who pays for what (`KEYS`), so that those of one owner stand in a row. How many
do is kept in the file's own Parquet metadata: numbers of rows, and for each key whose they are. A sum over
rows then reads numbers alone and no texts, and the runs by those keys that it is asked for. They are kept
by all keys, and by the first of them, which bills ask for: a few hundred runs where the others are thousands.
Runs say nothing that the rows don't: the writer compares them with what it reads back, the file's SHA-256
covers both, and a reader counts rows first.
"""

import base64
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEYS = ("payer", "cluster", "team", "model", "tier", "endpoint", "version", "adapter", "user")
BILLED = KEYS[:5]
NAME = b"forebay.owner_runs:"  # begins the names of entries, one for each key and one for the rows
_ROWS = "rows"
_KINDS = ("<i1", "<i2", "<i4")
_CODEC = "lz4_raw"
# Who reads a file by SQL takes its metadata whole each time: a half to a quarter of a byte a row.
_MOST_BYTES = 16 * 1024 * 1024


class Damaged(ValueError):
    """The runs in a file are not those of its rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """The runs of some rows: in each, all rows have the same owner.

    Attributes:
        begins: number of the first row of each run, ascending; the first is 0.
        rows: how many rows there are.
        owners: for each key the codes of its values, run by run, and the text of each code.
    """

    begins: Any
    rows: int
    owners: Mapping[str, tuple[Any, Any]]

    def by(self, names: Sequence[str]) -> "Runs":
        """Return the runs by some of the keys."""
        return dataclasses.replace(
            self, owners={each: self.owners[each] for each in names}
        ).joined()

    def joined(self) -> "Runs":
        """Return neighbours that have one owner as one run."""
        changes = _changes([codes for codes, _ in self.owners.values()], len(self.begins))
        return self._at(self.begins[changes], changes)

    def cut(self, where: Any) -> "Runs":
        """Return the runs with a border at each of these rows as well."""
        begins = np.union1d(self.begins, where)
        return self._at(begins, np.searchsorted(self.begins, begins, side="right") - 1)

    def _at(self, begins: Any, places: Any) -> "Runs":
        owners = {name: (codes[places], words) for name, (codes, words) in self.owners.items()}
        return Runs(begins, self.rows, owners)


def found(rows: Any, names: Sequence[str], same: Mapping[str, str]) -> Runs:
    """Find the runs by looking at the rows.

    Args:
        rows: a table, with one row at least.
        names: the text columns that tell owners apart.
        same: those of them that have one value in all rows, and need not be in the table.
    """
    codes = {name: _codes(rows[name]) for name in names if name not in same}
    begins = _changes([each for each, _ in codes.values()], rows.num_rows)
    owners = {name: (each[begins], words) for name, (each, words) in codes.items()}
    for name, word in same.items():
        owners[name] = np.zeros(len(begins), np.int32), pa.array([word], pa.string())
    return Runs(begins, rows.num_rows, owners)


def kept(groups: Sequence[Runs]) -> dict[bytes, bytes]:
    """Return the runs of a file's row groups as its metadata, without those that are too many to keep.

    Args:
        groups: the runs of each, by `KEYS`.
    """
    found: dict[bytes, bytes] = {}
    for keys in (BILLED, KEYS):
        texts = _texts([each.by(keys) for each in groups], keys)
        if sum(map(len, texts.values())) <= _MOST_BYTES:
            found |= texts
    return found


def _texts(groups: Sequence[Runs], keys: Sequence[str]) -> dict[bytes, bytes]:
    whole = pa.concat_tables(
        pa.table({name: pa.DictionaryArray.from_arrays(*each.owners[name]) for name in keys})
        for each in groups
    ).unify_dictionaries()
    counts = np.concatenate([np.diff(each.begins, append=each.rows) for each in groups])
    rows = {**_packed(counts), "groups": [len(each.begins) for each in groups]}
    found = {_entry(keys, _ROWS): rows}
    for name in keys:
        chunks = whole[name].chunks  # a row group each
        codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks])
        found[_entry(keys, name)] = {**_packed(codes), "words": chunks[0].dictionary.to_pylist()}
    return {name: json.dumps(each).encode() for name, each in found.items()}


def stored(about: Any, names: Sequence[str]) -> list[Runs] | None:
    """Return the runs that a file keeps for each of its row groups; None if it has none for these keys.

    Args:
        about: the file's metadata.
        names: the keys that are needed; neighbours may have the same values of them.

    Raises:
        Damaged: they are not of these rows.
    """
    texts = about.metadata or {}
    keys = BILLED if set(names) <= set(BILLED) else KEYS
    if not all(_entry(keys, name) in texts for name in (*names, _ROWS)):
        return None
    try:
        made = _read(texts, keys, names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"its runs of owners can't be read ({error})") from error
    rows = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
    if [each.rows for each in made] != rows:
        raise Damaged("its runs of owners are not those of its rows")
    return made


def _read(texts: Mapping[bytes, bytes], keys: Sequence[str], names: Sequence[str]) -> list[Runs]:
    told = json.loads(texts[_entry(keys, _ROWS)])
    counts, borders = _unpacked(told), np.cumsum([0, *told["groups"]])
    if borders[-1] != len(counts) or counts.min() < 1:
        raise ValueError("runs without rows")
    told_of = {name: json.loads(texts[_entry(keys, name)]) for name in names}
    owners = {name: _codes_of(each, len(counts)) for name, each in told_of.items()}
    made = []
    for first, last in itertools.pairwise(borders.tolist()):
        ends = np.cumsum(counts[first:last], dtype=np.int64)
        part = {name: (codes[first:last], words) for name, (codes, words) in owners.items()}
        made.append(Runs(ends - counts[first:last], int(ends[-1]), part))
    return made


def _entry(keys: Sequence[str], name: str) -> bytes:
    return NAME + f"{len(keys)}:{name}".encode()


def _packed(numbers: Any) -> dict[str, Any]:
    kind = next(kind for kind in _KINDS if numbers.max() <= np.iinfo(kind).max)
    data = pa.compress(numbers.astype(kind).tobytes(), codec=_CODEC, asbytes=True)
    text = base64.b64encode(data).decode()  # metadata is text
    return {"kind": kind, "count": len(numbers), "data": text}


def _unpacked(told: Mapping[str, Any]) -> Any:
    kind = np.dtype(_KINDS[_KINDS.index(told["kind"])])
    data = base64.b64decode(told["data"])
    return np.frombuffer(pa.decompress(data, told["count"] * kind.itemsize, codec=_CODEC), kind)


def _codes_of(told: Mapping[str, Any], runs: int) -> tuple[Any, Any]:
    codes, words = _unpacked(told), pa.array(told["words"], pa.string())
    if len(codes) != runs or codes.max() >= len(words):
        raise ValueError("owners without runs")
    return codes, words


def check(path: Path) -> None:
    """Compare the runs that a file keeps with its rows.

    Raises:
        Damaged: they differ.
    """
    with pq.ParquetFile(path, read_dictionary=list(KEYS)) as file:
        for keys in (BILLED, KEYS):
            for number, its in enumerate(stored(file.metadata, keys) or ()):
                rows = file.read_row_group(number, columns=list(keys), use_threads=False)
                seen = found(rows, keys, {})
                if not np.array_equal(its.begins, seen.begins) or _words(its) != _words(seen):
                    raise Damaged(f"{path}: its runs of owners are not those of its rows")


def _words(runs: Runs) -> dict[str, Any]:
    return {name: words.take(pa.array(codes)) for name, (codes, words) in runs.owners.items()}


def _changes(columns: Sequence[Any], rows: int) -> Any:
    """Return the places, 0 among them, at which one of some columns has another code than before."""
    changes = np.zeros(rows, bool)
    changes[:1] = True
    for each in columns:
        changes[1:] |= each[1:] != each[:-1]
    return np.flatnonzero(changes)


def _codes(column: Any) -> tuple[Any, Any]:
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    one = column.num_chunks == 1
    whole = column.chunk(0) if one else column.unify_dictionaries().combine_chunks()
    return whole.indices.to_numpy(), whole.dictionary
