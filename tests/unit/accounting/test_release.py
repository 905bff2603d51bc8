"""What the first release wrote is read for ever; what a later one adds stops nobody."""

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting import books, compact, manifest, records, schema, ship
from scheduler.contracts import clock
from tests.unit.accounting import samples

FIRST = Path(__file__).parents[2] / "data/accounting/release-0.1"
TEAMS = ["007", "7", "1e3", "NULL", "", "a:b"]
LATER = clock.FakeClock(samples.NOON + 2 * samples.DAY_US)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Shipped and compacted files, a manifest and a segment, all as the first release left them."""
    return Path(shutil.copytree(FIRST, tmp_path / "state"))


def check(state: Path) -> None:
    with books.Books(state).reading() as reading:
        assert reading.problems == ()
        rows = {row["request_id"]: row for row in reading.query("SELECT * FROM usage")}
        gpu = reading.query("SELECT sum(gpus) AS n, count(*) AS rows FROM gpu_rows")
        held = reading.query("SELECT count(*) AS n, sum(busy_us)::BIGINT AS b FROM replica_rows")
    assert rows.keys() == {f"q{n}" for n in range(24)}
    for n in range(24):
        row = rows[f"q{n}"]
        closed = n % 3 != 2
        assert row["kind"] == ("close" if closed else "replica")
        assert row["team"] == TEAMS[n % 6]
        assert row["output_tokens"] == (10 if n % 3 == 0 else 11) * n
        assert row["uncached_prompt_tokens"] == 100 + n
        assert row["waste_tokens"] == 0
    assert gpu == [{"n": 16, "rows": 4}]
    assert held == [{"n": 4, "b": 0}]


def test_files_segments_and_manifest_of_the_first_release_are_read(state: Path) -> None:
    check(state)


def test_they_are_shipped_and_compacted(state: Path) -> None:
    (path,) = ship.segments(state)
    assert path.read_bytes().startswith(b"FOREBAY1")
    done = ship.ship(state, clock.FakeClock(samples.NOON))
    assert (done.segments, done.problems) == (1, ())
    check(state)
    assert compact.compact(state, LATER).files_after == 3
    check(state)
    current = manifest.load(state / "parquet")
    assert current is not None
    assert [each.rows for each in current.files if each.table == schema.USAGE] == [24]


def test_a_later_release_may_have_added_columns_and_notes(state: Path) -> None:
    folder = state / "parquet"
    current = manifest.load(folder)
    assert current is not None
    entry = next(each for each in current.files if each.table == schema.USAGE)
    table = pq.read_table(folder / entry.path)
    more = table.append_column("carbon_mg", pa.repeat(7, table.num_rows))
    pq.write_table(more, folder / entry.path)
    text = json.loads((folder / manifest.NAME).read_text())
    for each in text["files"]:
        each["colour"] = "blue"
        if each["path"] == entry.path:
            each["sha256"] = manifest.digest(folder / entry.path)
            each["bytes"] = (folder / entry.path).stat().st_size
    text["files"].append({**text["files"][0], "table": "carbon"})
    (folder / manifest.NAME).write_text(json.dumps({**text, "motto": "onwards"}))
    check(state)
    ship.ship(state, clock.FakeClock(samples.NOON))
    assert compact.compact(state, LATER).problems == ()
    check(state)


def test_every_column_of_today_that_the_first_release_lacked_has_a_default() -> None:
    for table, record in schema.RECORDS.items():
        for one in record:
            for field in dataclasses.fields(one):
                if field.name not in schema.FIRST_RELEASE and field.name != "identity":
                    assert field.default is not dataclasses.MISSING, field.name
                    assert field.default == schema.default(table, field.name)
    assert set(records.COLUMNS["u"]) - schema.FIRST_RELEASE == {"waste_tokens"}
