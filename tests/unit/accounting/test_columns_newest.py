"""Of rows that an agent wrote again and again the shipper keeps the last."""

from pathlib import Path

import pytest

from accounting import books, manifest, ship, spool
from scheduler.contracts import clock as clocks
from scheduler.contracts import usage
from tests.unit.accounting import samples


@pytest.mark.parametrize("writers", [1, 2])
def test_rows_that_a_later_one_extends_are_not_kept(
    tmp_path: Path, writers: int, fake_clock: clocks.FakeClock
) -> None:
    rows: list[usage.Row] = []
    for seconds in (3, 1, 2):
        rows += [samples.gpu(0, seconds), samples.gpu(0, seconds, run=1, start_us=samples.NOON)]
        rows.append(samples.replica("serving", samples.NOON, samples.NOON + seconds))
    rows.append(samples.replica("serving", samples.NOON + 3, samples.NOON + 4, seq=1))
    for number in range(writers):
        sink = spool.Spool(tmp_path / "spool" / str(number), "agent", clock=fake_clock)
        for row in rows:
            sink.append(row)
        sink.close()
    assert ship.ship(tmp_path, fake_clock).problems == ()
    with books.Books(tmp_path).reading() as reading:
        gpu = reading.query("SELECT run, end_us - start_us AS us FROM gpu_rows ORDER BY run")
        times = reading.query("SELECT seq, end_us - start_us AS us FROM replica_rows ORDER BY seq")
    held = manifest.load(tmp_path / "parquet")
    assert held is not None
    assert {file.table: file.rows for file in held.files} == {"gpu": 2, "replica_time": 2}
    assert [(row["run"], row["us"]) for row in gpu] == [(0, 3_000_000), (1, 3_000_000)]
    assert [(row["seq"], row["us"]) for row in times] == [(0, 3), (1, 1)]
