"""One file a day, the same sums, and readers undisturbed."""

from pathlib import Path

from accounting import books, compact, manifest, ship
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


def test_today_is_left_alone(tmp_path: Path) -> None:
    world(tmp_path)
    assert compact.compact(tmp_path, clock.FakeClock(samples.NOON)).files_before == 0


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
