"""What one bad row, path or day may do to all the others: nothing, and it is named."""

import os
from pathlib import Path
from typing import Any

import duckdb
import pytest

from accounting import (
    books,
    decoding,
    gpu_lines,
    gpu_minutes,
    records,
    rolling,
    rollup,
    segment,
    ship,
    spool,
    stepcost,
)
from scheduler.contracts import clock, errors, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_routes import ask
from tests.unit.accounting.test_ship import requests, write

LARGEST = 2**63 - 1
NOW = clock.FakeClock(samples.NOON + 7_200_000_000)


def test_a_zeroed_length_in_a_sealed_segment_is_named_and_set_aside(tmp_path: Path) -> None:
    path = write(tmp_path, [samples.row(request_id=f"q{n}") for n in range(5)])
    data = bytearray(path.read_bytes())
    third = data.index(b"q2") - records.FRAME_BYTES - 2
    data[third : third + 4] = bytes(4)
    path.write_bytes(data)
    with books.Books(tmp_path).reading() as reading:
        assert "torn or damaged" in reading.problems[0]
    done = ship.ship(tmp_path, NOW)
    assert (done.rows, len(done.problems)) == (2, 1)
    assert (tmp_path / "spool" / "quarantine" / f"{path.name}.damaged").exists()


def test_bytes_after_the_seal_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, [samples.row()])
    read = decoding.decode(segment.scan(path.read_bytes() + b"more", "s"))
    assert (len(read.rows), read.sealed) == (1, True)
    assert "follow the seal" in read.problem


@pytest.mark.parametrize("value", [-1, LARGEST + 1, 1.5, True])
def test_a_number_that_readers_refuse_is_refused_at_once(tmp_path: Path, value: int) -> None:
    sink = spool.Spool(tmp_path / "spool", "w", clock=clock.FakeClock())
    for row in (
        samples.row(output_tokens=value),
        samples.row(arrived_us=value),
        samples.gpu(gpus=value),
    ):
        with pytest.raises(errors.Internal, match="no whole number"):
            sink.append(row)
    sink.append(samples.row(output_tokens=LARGEST))
    sink.close()
    assert requests(tmp_path) == ["q1"]


def test_sums_of_any_size_are_exact(tmp_path: Path) -> None:
    large: dict[str, Any] = {"output_tokens": LARGEST, "uncached_prompt_tokens": LARGEST}
    more: dict[str, Any] = {"cached_prompt_tokens": LARGEST, "outcome": "error"}
    rows: list[usage.Row] = [
        samples.row(kind, f"q{n}", **large, **more)
        for n in range(3)
        for kind in ("close", "replica")
    ]
    write(tmp_path, rows)
    ship.ship(tmp_path, NOW)
    assert rolling.roll(books.Books(tmp_path), NOW).problems == ()
    with rollup.opened(rollup.path_of(tmp_path)) as session:
        for level in rollup.LEVELS:
            text = f"SELECT sum(output_tokens) FROM usage_{level}"
            assert session.execute(text).fetchall() == [(3 * LARGEST,)]


def test_sums_of_an_earlier_release_become_wide(tmp_path: Path) -> None:
    path = rollup.path_of(tmp_path)
    with rollup.opened(path, write=True) as session:
        rollup.create(session)
        session.execute("ALTER TABLE usage_days ALTER output_tokens TYPE BIGINT")
    with rollup.opened(path, write=True) as session:
        rollup.create(session)
        kinds = dict(
            session.execute("SELECT name, type FROM pragma_table_info('usage_days')").fetchall()
        )
    assert (kinds["output_tokens"], kinds["period_us"]) == ("HUGEINT", "BIGINT")


def test_a_day_that_cannot_be_summed_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [samples.row("close", "q1")])
    write(tmp_path, [samples.row("close", "q2", started_us=samples.NOON - samples.DAY_US)])
    ship.ship(tmp_path, NOW)
    plain = rolling._sum

    def failing(records: books.Books, day: str, *rest: Any) -> object:
        if day == "2026-11-26":
            raise duckdb.OutOfRangeException("Overflow\nand more")
        return plain(records, day, *rest)

    monkeypatch.setattr(rolling, "_sum", failing)
    done = rolling.roll(books.Books(tmp_path), NOW)
    assert done.days == 1
    assert done.problems[0].endswith("2026-11-26 can't be summed, it keeps its old sums: Overflow")


def test_an_hour_that_cannot_be_shared_out_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = samples.NOON - 3_600_000_000
    write(tmp_path, [samples.gpu(start_us=hour), samples.gpu(seq=1)])
    ship.ship(tmp_path, NOW)
    plain = gpu_lines.find

    def failing(reading: books.Reading, minutes: Any, *rest: Any, **more: Any) -> Any:
        if minutes[0] == hour:
            raise ValueError("an amount is too large")
        return plain(reading, minutes, *rest, **more)

    monkeypatch.setattr(gpu_lines, "find", failing)
    done = gpu_minutes.roll(tmp_path, NOW, stepcost.Cost(1, 1))
    assert done.hours == 1
    assert done.problems == (
        "GPU time of 2026-11-27 11:00Z can't be shared out: an amount is too large",
    )


async def test_a_report_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise duckdb.OutOfRangeException("Overflow\nand more")

    monkeypatch.setattr("accounting.reports.requests", failing)
    answer = await ask(tmp_path, "requests", code=500)
    assert answer["error"]["message"].startswith("this report can't be made: Overflow:")


def test_a_path_that_cannot_be_read_stops_nothing(tmp_path: Path) -> None:
    write(tmp_path, [samples.row()])
    (tmp_path / "spool" / "a.seg").mkdir()
    (tmp_path / "spool" / "b.seg").symlink_to(tmp_path / "spool" / "b.seg")
    with books.Books(tmp_path).reading() as reading:
        assert len(reading.problems) == 2
    done = ship.ship(tmp_path, NOW)
    assert (done.rows, len(done.problems)) == (1, 2)
    assert all("not read" in each for each in done.problems)
    assert requests(tmp_path) == ["q1"]


def test_whatever_the_umask_the_books_are_not_everybodys(tmp_path: Path) -> None:
    state = tmp_path / "state"
    before = os.umask(0)
    try:
        write(state, [samples.row()])
        ship.ship(state, NOW)
        rolling.roll(books.Books(state), NOW)
    finally:
        os.umask(before)
    assert state.stat().st_mode & 0o777 == 0o750
    assert rollup.path_of(state).stat().st_mode & 0o777 == 0o640


def test_rows_of_1970_and_of_the_far_future_block_nothing(tmp_path: Path) -> None:
    times = {"then": 1, "now": samples.NOON, "later": LARGEST - 2_000_000}
    write(tmp_path, [samples.row(request_id=name, started_us=us) for name, us in times.items()])
    done = ship.ship(tmp_path, NOW)
    assert (done.rows, done.problems) == (3, ())
    assert rolling.roll(books.Books(tmp_path), NOW).problems == ()
    assert sorted(requests(tmp_path)) == ["later", "now", "then"]


@pytest.mark.parametrize("late", ["close", "replica"])
def test_attempts_that_a_dead_writer_left_open_are_lost_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    sink = spool.Spool(tmp_path / "spool", "w", clock=clock.FakeClock())
    sink.append(samples.row("open", "left"))
    sink.append(samples.row("open", "done"))
    sink.append(samples.row("close", "done"))
    monkeypatch.setattr(segment, "writer_alive", lambda _: False)
    assert ship.ship(tmp_path, NOW).rows == 3
    ask_for = "SELECT outcome, payer, output_tokens FROM usage ORDER BY request_id"
    with books.Books(tmp_path).reading() as reading:
        assert reading.session.execute(ask_for).fetchall() == [
            ("ok", "team", 0),
            ("error", "platform", 0),
        ]
    write(tmp_path, [samples.row(late, "left", output_tokens=4)])
    ship.ship(tmp_path, NOW)
    with books.Books(tmp_path).reading() as reading:
        assert reading.session.execute(ask_for).fetchall()[1] == ("ok", "team", 4)
    sink.close()
