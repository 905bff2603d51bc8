"""From the spool to Parquet: once, whole, and with every damage named."""

import os
from pathlib import Path

import pytest

from accounting import books, manifest, records, schema, segment, ship, spool
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples


def write(state: Path, rows: list[usage.Row], writer: str = "w") -> Path:
    folder = state / "spool" / writer
    before = set(folder.glob("*.seg"))
    sink = spool.Spool(folder, writer, clock=clock.FakeClock())
    for row in rows:
        sink.append(row)
    sink.close()
    (path,) = set(folder.glob("*.seg")) - before
    return path


def requests(state: Path, kept: books.Books | None = None) -> list[str]:
    with (kept or books.Books(state)).reading() as reading:
        return [
            row["request_id"] for row in reading.query("SELECT request_id FROM usage ORDER BY 1")
        ]


def rows_stored(state: Path) -> int:
    current = manifest.load(state / "parquet")
    assert current is not None
    return sum(each.rows for each in current.files)


def test_rows_are_seen_before_and_after_and_once(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    write(tmp_path, [samples.row(request_id=f"q{n}") for n in range(5)])
    assert requests(tmp_path) == ["q0", "q1", "q2", "q3", "q4"]
    done = ship.ship(tmp_path, fake_clock)
    assert (done.segments, done.rows, done.files, done.problems) == (1, 5, 1, ())
    assert ship.segments(tmp_path) == []
    assert requests(tmp_path) == ["q0", "q1", "q2", "q3", "q4"]
    again = ship.ship(tmp_path, fake_clock)
    assert (again.segments, again.generation) == (0, 1)
    assert rows_stored(tmp_path) == 5


def test_each_row_lies_in_the_utc_day_of_its_beginning(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    midnight = samples.NOON + samples.DAY_US // 2
    write(
        tmp_path,
        [
            samples.row(request_id="before", arrived_us=midnight - 1, ended_us=midnight + 9),
            samples.row("open", request_id="after", arrived_us=midnight),
            samples.gpu(start_us=midnight - 1),
            samples.replica("serving", midnight, midnight + 1),
            samples.row(request_id="mad", arrived_us=2**62),
        ],
    )
    ship.ship(tmp_path, fake_clock)
    current = manifest.load(tmp_path / "parquet")
    assert current is not None
    assert sorted((each.table, each.day) for each in current.files) == [
        ("gpu", "2026-11-27"),
        ("replica_time", "2026-11-28"),
        ("usage", "2026-11-27"),
        ("usage", "2026-11-28"),
        ("usage", "9999-12-31"),
    ]


def test_what_never_reached_a_replica_is_in_the_window_of_its_arrival(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    write(tmp_path, [samples.row(outcome="refused", started_us=0, arrived_us=samples.NOON)])
    for _ in range(2):
        with books.Books(tmp_path).reading(samples.NOON, samples.NOON + 1) as reading:
            assert len(reading.query("SELECT * FROM usage")) == 1
        with books.Books(tmp_path).reading(samples.NOON + 1) as reading:
            assert reading.query("SELECT * FROM usage") == []
        ship.ship(tmp_path, fake_clock)


def test_team_names_that_look_like_numbers_or_null_stay_text(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    names = ["007", "7", "1e3", "NULL", "", "a:b", "a", "true", "2026-11-27"]
    write(
        tmp_path,
        [
            samples.row(request_id=f"q{n}", team=name, key_id="b:c" if name == "a" else "c")
            for n, name in enumerate(names)
        ],
    )
    for _ in range(2):
        with books.Books(tmp_path).reading() as reading:
            seen = reading.query("SELECT team, key_id, count(*) AS n FROM usage GROUP BY ALL")
        assert sorted(row["team"] for row in seen) == sorted(names)
        assert all(row["n"] == 1 for row in seen)
        ship.ship(tmp_path, fake_clock)


def test_a_living_writers_segment_is_left_and_its_rows_are_seen(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    sink = spool.Spool(tmp_path / "spool", "w", clock=fake_clock)
    sink.append(samples.row())
    now = clock.SystemClock()
    assert ship.ship(tmp_path, now).segments == 0
    assert requests(tmp_path) == ["q1"]
    sink.close()
    assert ship.ship(tmp_path, now).segments == 1


async def test_a_frozen_writers_segment_is_taken_over_and_nothing_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    now = clock.SystemClock()
    sink = spool.Spool(tmp_path / "spool", "w", clock=now)
    sink.append(samples.row(request_id="acknowledged"))
    await sink.sync()
    sink.append(samples.row(request_id="in flight"))
    (path,) = ship.segments(tmp_path)
    long_ago = now.wall_us() / 1e6 - 600
    os.utime(path, (long_ago, long_ago))
    assert ship.ship(tmp_path, now).rows == 2
    assert ship.segments(tmp_path) == []
    sink.append(samples.row(request_id="after the thaw"))
    await sink.sync()
    assert requests(tmp_path) == ["acknowledged", "after the thaw", "in flight"]
    sink.close()
    ship.ship(tmp_path, now)
    assert requests(tmp_path) == ["acknowledged", "after the thaw", "in flight"]
    assert not list((tmp_path / "spool").rglob("*.taken"))


def test_a_damaged_segment_keeps_its_good_rows_and_is_set_aside(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    path = write(tmp_path, [samples.row(request_id=f"q{n}") for n in range(5)])
    data = bytearray(path.read_bytes())
    data[-300] ^= 1
    path.write_bytes(data)
    long_ago = (
        fake_clock.wall_us() / 1e6 - 600
    )  # with its seal lost it looks like a living writer's
    os.utime(path, (long_ago, long_ago))
    done = ship.ship(tmp_path, fake_clock)
    (problem,) = done.problems
    assert problem.startswith(path.name)
    assert requests(tmp_path) == ["q0", "q1", "q2", "q3"][: done.rows]
    assert 0 < done.rows < 5
    assert [each.name for each in (tmp_path / "spool" / "quarantine").iterdir()] == [
        f"{path.name}.damaged"
    ]


def test_a_corrupt_file_is_named_and_set_aside_and_never_summed(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    write(tmp_path, [samples.row(request_id="good")])
    ship.ship(tmp_path, fake_clock)
    write(tmp_path, [samples.row(request_id="bad", output_tokens=5)])
    ship.ship(tmp_path, fake_clock)
    current = manifest.load(tmp_path / "parquet")
    assert current is not None
    path = tmp_path / "parquet" / current.files[1].path
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
    path.write_bytes(data)
    kept = books.Books(tmp_path)
    for _ in range(2):
        with kept.reading() as reading:
            assert [row["request_id"] for row in reading.query("SELECT * FROM usage")] == ["good"]
            (problem,) = reading.problems
        assert path.name in problem
        assert "1 usage rows of 2026-11-27 are not counted" in problem
    assert (tmp_path / "parquet" / "quarantine" / f"{path.name}.damaged").exists()


def test_a_lost_manifest_is_told_and_nothing_is_touched(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    write(tmp_path, [samples.row()])
    ship.ship(tmp_path, fake_clock)
    (tmp_path / "parquet" / manifest.NAME).unlink()
    for act in (lambda: ship.ship(tmp_path, fake_clock), lambda: requests(tmp_path)):
        with pytest.raises(manifest.ManifestDamaged, match="restore it from a backup"):
            act()
    assert len(list((tmp_path / "parquet").rglob("*.parquet"))) == 1


def test_a_second_shipper_stays_out(tmp_path: Path, fake_clock: clock.FakeClock) -> None:
    write(tmp_path, [samples.row()])
    (tmp_path / "parquet").mkdir()
    with ship.lock(tmp_path / "parquet") as ours:
        assert ours
        assert ship.ship(tmp_path, fake_clock).busy
    assert ship.ship(tmp_path, fake_clock).rows == 1


def test_small_batches_make_several_generations(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    for n in range(4):
        write(tmp_path, [samples.row(request_id=f"q{n}")])
    done = ship.ship(tmp_path, fake_clock, batch_bytes=1)
    assert (done.generation, done.files, done.rows) == (4, 4, 4)
    assert requests(tmp_path) == ["q0", "q1", "q2", "q3"]


def test_a_clock_that_stepped_back_takes_nothing_over_and_ships_what_is_sealed(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    sink = spool.Spool(tmp_path / "spool" / "live", "live", clock=fake_clock)
    sink.append(samples.row(request_id="live"))
    write(tmp_path, [samples.row(request_id="sealed")])
    hour_ago = clock.FakeClock(clock.SystemClock().wall_us() - 3_600_000_000)
    assert ship.ship(tmp_path, hour_ago).rows == 1
    assert requests(tmp_path) == ["live", "sealed"]
    sink.close()


def test_what_utf8_cannot_hold_does_not_stop_the_shipper(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    write(tmp_path, [samples.row(request_id="q", custom_id="caf\udce9", reason="x\0y")])
    assert ship.ship(tmp_path, fake_clock).rows == 1
    with books.Books(tmp_path).reading() as reading:
        assert reading.query("SELECT custom_id, reason FROM usage") == [
            {"custom_id": "caf?", "reason": "x\0y"}
        ]


def test_asking_often_and_restarting_changes_no_sum(
    tmp_path: Path, fake_clock: clock.FakeClock
) -> None:
    rows: list[usage.Row] = [
        samples.row(request_id=f"q{n}", batch_job_id=12, custom_id=f"l{n}", output_tokens=n)
        for n in range(9)
    ]
    write(tmp_path, rows)
    for turn in range(6):
        with books.Books(tmp_path).reading() as reading:
            (total,) = reading.query(
                "SELECT sum(output_tokens) AS n FROM usage WHERE batch_job_id = 12"
            )
        assert total["n"] == sum(range(9))
        ship.ship(tmp_path, fake_clock)
        if turn == 2:
            write(tmp_path, rows)  # a writer that came back after a take-over wrote them again


def test_schema_has_no_nulls_and_only_texts_and_integers() -> None:
    for table in schema.TABLES:
        for field in schema.schema(table):
            assert not field.nullable
            assert str(field.type) == ("string" if field.name in records.TEXT_COLUMNS else "int64")


def test_a_living_writers_segment_is_not_read_whole_at_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = spool.Spool(tmp_path / "spool", "w", clock=clock.FakeClock())
    sink.append(samples.row())
    (path,) = ship.segments(tmp_path)
    now = clock.FakeClock(round(path.stat().st_mtime * 1e6))
    with monkeypatch.context() as patch:
        patch.setattr(segment, "scan_segment", lambda _: pytest.fail("read whole"))
        assert ship.ship(tmp_path, now).segments == 0
    header, is_closed = segment.peek(path)
    assert (header["writer"], is_closed) == ("w", False)
    sink.close()
    assert segment.peek(path) == (header, True)
    assert ship.ship(tmp_path, now).rows == 1
