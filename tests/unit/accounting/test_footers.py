"""What compacted files say of themselves is worked out once, and never outlives its file's content."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting import books, compact, footers, owner_runs, schema, ship, tokens
from scheduler.contracts import clock
from tests.unit.accounting import samples
from tests.unit.accounting.test_ship import write

DAY = samples.DAY_US
LATER = clock.FakeClock(samples.NOON + 9 * DAY)
KEYS = ("team", "model")

pytestmark = pytest.mark.duckdb


def compacted(state: Path, *requests: str) -> None:
    """Write one request of each name, a token each, and compact their day."""
    write(state, [samples.row("close", name, output_tokens=1) for name in requests])
    ship.ship(state, LATER)
    assert compact.compact(state, LATER).problems == ()


def billed(records: books.Books, keys: tuple[str, ...] = KEYS) -> int:
    found = tokens.take(records, [(0, books.MAX_US)], keys)
    assert found.problems == ()
    return sum(each.output_tokens for each in found.sums)


def test_a_second_bill_works_nothing_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted(tmp_path, "q1", "q2")
    records = books.Books(tmp_path)
    asked: list[tuple[str, ...]] = []
    really = owner_runs.stored

    def stored(about: Any, names: tuple[str, ...]) -> Any:
        asked.append(names)
        return really(about, names)

    monkeypatch.setattr(owner_runs, "stored", stored)
    assert [billed(records) for _ in range(3)] == [2, 2, 2]
    assert len(asked) == 1
    assert [billed(records, ("team",)) for _ in range(2)] == [2, 2]
    assert asked == [(*KEYS, "payer"), ("team", "payer")]
    compacted(tmp_path, "q3")  # another file has their day now
    asked.clear()
    assert [billed(records) for _ in range(2)] == [3, 3]
    assert len(asked) == 1


def test_a_file_that_is_damaged_after_it_was_billed_is_named(tmp_path: Path) -> None:
    compacted(tmp_path, "q1", "q2")
    records = books.Books(tmp_path)
    assert billed(records) == 2
    (file,) = records.snapshot().files[schema.USAGE]
    path = records.path(file)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = tokens.take(records, [(0, books.MAX_US)], KEYS)
    assert found.sums == []
    assert "damaged" in found.problems[0]


def test_those_that_were_not_asked_for_the_longest_give_way(tmp_path: Path) -> None:
    path = tmp_path / "one.parquet"
    pq.write_table(pa.table({"n": [1]}), path)
    one = footers.Footer(pq.read_metadata(path), None, [1])
    kept = footers.Footers(2 * one.bytes)
    for name in ("a", "b"):
        kept.put((name, ()), one)
    kept.put(("b", ()), one)  # two threads that worked out the same
    assert kept.get(("a", ())) is one
    kept.put(("c", ()), one)
    assert [name for name in "abc" if kept.get((name, ())) is not None] == ["a", "c"]
    kept = footers.Footers(one.bytes - 1)
    kept.put(("a", ()), one)
    assert kept.get(("a", ())) is None
