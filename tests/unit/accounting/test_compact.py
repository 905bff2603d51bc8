"""One file a day, the same sums, and readers undisturbed."""

import contextlib
import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accounting import books, compact, manifest, merge, pieces, schema, ship, tokens
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_ship import requests, write

LATER = clock.FakeClock(samples.NOON + 2 * samples.DAY_US)


def files(state: Path) -> list[str]:
    current = manifest.load(state / "parquet")
    assert current is not None
    return [each.path for each in current.files]


def world(state: Path) -> None:
    rows: list[usage.Row] = [samples.row("open", "q1"), samples.row("close", "q1"), samples.gpu()]
    for extra in (samples.row("close", "q2"), samples.row("close", "q3")):
        write(state, [*rows, extra])  # the first three are written each time, as after a take-over
        ship.ship(state, LATER)


def test_files_of_a_past_day_become_one_and_repeated_rows_go(tmp_path: Path) -> None:
    world(tmp_path)
    old = files(tmp_path)
    done = compact.compact(tmp_path, LATER)
    assert (done.files_before, done.files_after, done.repeated_rows) == (4, 2, 4)
    assert len(files(tmp_path)) == 2
    assert requests(tmp_path) == ["q1", "q2", "q3"]
    assert all((tmp_path / "parquet" / path).exists() for path in old)  # for who reads them now
    ship.ship(tmp_path, clock.FakeClock(LATER.wall_us() + ship.RETIRED_US + 1))
    assert not any((tmp_path / "parquet" / path).exists() for path in old)
    assert requests(tmp_path) == ["q1", "q2", "q3"]
    assert compact.compact(tmp_path, LATER).files_before == 0


def test_a_snapshot_taken_before_still_finds_its_files(tmp_path: Path) -> None:
    world(tmp_path)
    with books.Books(tmp_path).reading() as reading:
        compact.compact(tmp_path, LATER)
        ship.ship(tmp_path, LATER)
        assert len(reading.query("SELECT * FROM usage")) == 3


def test_a_file_that_goes_before_sql_comes_to_it_is_looked_up_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk so slow that a replaced file's quarter of an hour is over."""
    write(tmp_path, [samples.row("close", "q1", output_tokens=5)])
    ship.ship(tmp_path, LATER)
    really = books.Books.opened
    gone: list[Path] = []

    @contextlib.contextmanager
    def opened(self: books.Books, found: books.Snapshot, *window: int) -> Iterator[Any]:
        with really(self, found, *window) as session:
            if not gone:
                gone.append(self.path(found.files[schema.USAGE][0]))
                assert compact.compact(tmp_path, LATER, loose_files=1).files_after == 1
                gone[0].unlink()
            yield session

    monkeypatch.setattr(books.Books, "opened", opened)
    (found,) = tokens.take(books.Books(tmp_path), [(0, books.MAX_US)], ("team",)).sums
    assert (found.output_tokens, len(gone)) == (5, 1)


def test_today_is_left_alone(tmp_path: Path) -> None:
    world(tmp_path)
    assert compact.compact(tmp_path, clock.FakeClock(samples.NOON)).files_before == 0


def test_no_merge_is_planned_with_what_has_no_rows(tmp_path: Path) -> None:
    """DuckDB plans each view that is named, which took most of the time of a small question."""

    def parts() -> set[str]:
        with books.Books(tmp_path).reading() as reading:
            found = reading.query("SELECT view_name AS name FROM duckdb_views() WHERE NOT internal")
        return {row["name"] for row in found} & {"usage_settled", "usage_compacted", "usage_fresh"}

    world(tmp_path)
    assert parts() == {"usage_fresh"}
    compact.compact(tmp_path, LATER)
    assert parts() == {"usage_settled"}
    write(tmp_path, [samples.row("close", "q4", started_us=LATER.wall_us())])
    assert parts() == {"usage_settled", "usage_fresh"}
    write(tmp_path, [samples.row("close", "q5")])
    assert parts() == {"usage_compacted", "usage_fresh"}
    assert requests(tmp_path) == ["q1", "q2", "q3", "q4", "q5"]


def test_a_damaged_day_is_named_and_left(tmp_path: Path) -> None:
    world(tmp_path)
    path = tmp_path / "parquet" / next(each for each in files(tmp_path) if each.startswith("usage"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = compact.compact(tmp_path, LATER)
    assert done.files_after == 1  # the gpu rows
    assert path.name in done.problems[0]


def test_who_does_not_have_the_lock_does_nothing(tmp_path: Path) -> None:
    world(tmp_path)
    with ship.lock(tmp_path / "parquet"):
        assert compact.compact(tmp_path, LATER).busy


class Hours:
    """A day on which ten attempts an hour are shipped in a file each."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.midnight = samples.NOON - samples.DAY_US // 2
        self.names: list[str] = []

    def clock(self, hour: float) -> clock.FakeClock:
        return clock.FakeClock(self.midnight + round(hour * HOUR_US))

    def write(self, hour: int, number: int = 10) -> None:
        for n in range(number):
            name = f"q{len(self.names)}"
            arrived = self.midnight + hour * HOUR_US + n * HOUR_US // number
            rows: list[usage.Row] = [
                samples.row("close", name, started_us=arrived, output_tokens=1),
                samples.gpu(len(self.names), start_us=arrived),
            ]
            write(self.state, rows)
            ship.ship(self.state, self.clock(hour + 1))
            self.names.append(name)

    def compact(self, hour: float) -> compact.Compacted:
        return compact.compact(self.state, self.clock(hour), loose_files=3)

    def files(self, table: str = "usage") -> list[tuple[int, bool, int]]:
        current = manifest.load(self.state / "parquet")
        assert current is not None
        return sorted(
            (each.hour, each.merged, each.rows) for each in current.files if each.table == table
        )


HOUR_US = samples.DAY_US // 24


def test_hours_that_are_over_become_a_file_each_while_the_day_goes_on(tmp_path: Path) -> None:
    day = Hours(tmp_path)
    for hour in range(3):
        day.write(hour)
    assert day.compact(2.2).files_before == 2 * 20  # two hours are over, and each has two tables
    assert day.files() == [(-1, False, 1)] * 10 + [(0, True, 10), (1, True, 10)]
    assert day.files("gpu") == [(-1, False, 1)] * 10 + [(0, False, 10), (1, False, 10)]
    assert day.compact(3.2).files_after == 4 - 2
    assert day.files() == [(0, True, 10), (1, True, 10), (2, True, 10)]
    assert requests(tmp_path) == sorted(day.names)
    assert day.compact(24 + 7).files_after == 2
    assert day.files() == [(-1, True, 30)]
    assert day.files("gpu") == [(-1, False, 30)]
    assert day.compact(24 + 8).files_before == 0
    assert requests(tmp_path) == sorted(day.names)


def test_late_rows_lie_beside_their_hour_until_there_are_many(tmp_path: Path) -> None:
    day = Hours(tmp_path)
    day.write(0)
    day.compact(1.2)
    write(
        tmp_path, [samples.row("close", "q3", started_us=day.midnight + 3 * HOUR_US // 10)]
    )  # again
    ship.ship(tmp_path, day.clock(2))
    day.write(0, 1)
    assert day.compact(2.2).files_before == 0
    assert requests(tmp_path) == sorted(day.names)
    day.write(0, 2)
    assert day.compact(2.3).repeated_rows == 1
    assert day.files() == [(0, True, 13)]
    assert requests(tmp_path) == sorted(day.names)


def test_a_file_that_reaches_into_this_hour_is_parted(tmp_path: Path) -> None:
    day = Hours(tmp_path)
    rows: list[usage.Row] = [
        samples.row("open", f"q{n}", started_us=day.midnight + HOUR_US + n) for n in range(-3, 4)
    ]
    for row in rows:
        write(tmp_path, [row, rows[-1]])
        ship.ship(tmp_path, day.clock(1))
    assert day.compact(1.2).problems == ()
    # What all files say of this hour's last is said once, what lies in this hour alone is left.
    assert day.files() == [(-1, False, 1), *[(-1, False, 2)] * 4, (0, True, 3)]
    assert requests(tmp_path) == sorted(f"q{n}" for n in range(-3, 4))
    # Nobody is given up while the day goes on, also if all of it is one file of an hour.
    assert outcomes(tmp_path) == {"open"}
    assert day.compact(24 + 5).given_up == 0
    assert day.compact(24 + 7).given_up == 7
    assert outcomes(tmp_path) == {"error"}


def test_an_hours_file_alone_is_the_days_in_the_end(tmp_path: Path) -> None:
    day = Hours(tmp_path)
    for n in range(5):
        write(tmp_path, [samples.row("open", f"q{n}", started_us=day.midnight + n)])
        ship.ship(tmp_path, day.clock(1))
    day.compact(1.2)
    assert day.files() == [(0, True, 5)]
    assert day.compact(24 + 7).given_up == 5
    assert day.files() == [(-1, True, 5)]


def outcomes(state: Path) -> set[str]:
    with books.Books(state).reading() as reading:
        return {row["outcome"] for row in reading.query("SELECT DISTINCT outcome FROM usage")}


def test_a_damaged_file_of_an_hour_is_named_and_left(tmp_path: Path) -> None:
    day = Hours(tmp_path)
    day.write(0)
    path = tmp_path / "parquet" / files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = day.compact(1.2)
    assert path.name in done.problems[0]
    assert len(day.files()) == 10
    assert day.files("gpu") == [(0, False, 10)]


def test_an_hour_whose_files_are_old_is_as_old_as_they_are(tmp_path: Path) -> None:
    """Else rollups would sum it again each time, and count a late revision where no row was late."""
    day = Hours(tmp_path)
    day.write(0, 3)
    day.write(1, 3)
    day.write(2, 3)
    day.compact(2.2)
    current = manifest.load(tmp_path / "parquet")
    assert current is not None
    newest = {each.hour: each.since for each in current.files if each.table == "usage"}
    assert newest == {0: 3, 1: 6, manifest.DAY: 9}


def test_a_day_that_cannot_be_merged_stops_no_other(tmp_path: Path) -> None:
    world(tmp_path)
    folder = tmp_path / "parquet"
    current = manifest.load(folder)
    assert current is not None
    first = next(each for each in current.files if each.table == "gpu")  # gpu comes first
    path = folder / first.path
    path.write_bytes(b"not Parquet")
    entry = dataclasses.replace(first, sha256=manifest.digest(path), bytes=path.stat().st_size)
    kept = tuple(entry if each is first else each for each in current.files)
    manifest.save(folder, dataclasses.replace(current, files=kept))
    done = compact.compact(tmp_path, LATER)
    assert f"gpu of {first.day}, not compacted" in done.problems[0]
    assert done.files_after == 1  # the requests
    same_day = clock.FakeClock(samples.NOON + 2 * HOUR_US)
    assert "not compacted" in compact.compact(tmp_path, same_day, loose_files=1).problems[0]


def test_a_disk_that_is_full_keeps_no_part_of_what_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = Hours(tmp_path)
    day.write(0, 3)
    day.write(1, 3)
    before = set((tmp_path / "parquet").rglob("*"))
    really = pieces.write
    written: list[manifest.File] = []

    def write_two(*given: Any) -> manifest.File:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(really(*given))
        return written[0]

    monkeypatch.setattr(pieces, "write", write_two)
    with pytest.raises(OSError, match="No space left"):
        day.compact(2.2)
    assert set((tmp_path / "parquet").rglob("*")) == before
    monkeypatch.undo()
    day.compact(2.2)
    assert requests(tmp_path) == sorted(day.names)


def test_what_a_replica_told_outlives_its_hours_merge_when_its_close_is_amended(
    tmp_path: Path,
) -> None:
    day = Hours(tmp_path)
    about: dict[str, Any] = {"started_us": day.midnight + 10, "outcome": "replica_lost"}
    close = samples.row("close", "lost", output_tokens=3, **about)
    replica = samples.row("replica", "lost", output_tokens=8, waste_tokens=2, **about)
    amended = dataclasses.replace(close, payer=usage.Payer.PLATFORM, ended_us=close.ended_us + 1)
    expected = [row.flat() for row in merge.merge([close, replica, amended])]
    assert (expected[0]["output_tokens"], expected[0]["waste_tokens"]) == (8, 2)
    write(tmp_path, [close, replica])
    day.write(0)
    assert day.compact(1.2).files_after == 2
    write(tmp_path, [amended])
    for hour in (1.3, 24 + 7):
        ship.ship(tmp_path, day.clock(hour))
        day.compact(hour)
        with books.Books(tmp_path).reading() as reading:
            found = reading.query("SELECT * FROM usage WHERE request_id = 'lost'")
        assert found == expected
