"""A reading's window: whole days are read without a filter, and the borders still cut rows."""

from pathlib import Path

import pytest

from accounting import books, compact, schema, ship
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_ship import write

MIDNIGHT = samples.NOON - samples.DAY_US // 2
HOUR = samples.DAY_US // 24
TIMES = [
    MIDNIGHT + day * samples.DAY_US + us
    for day in range(3)
    for us in (0, 5 * HOUR, samples.DAY_US - 1)
]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days: the first compacted, the second with late rows beside, the third in a spool as well."""
    folder = tmp_path_factory.mktemp("days")
    later = clock.FakeClock(samples.NOON + 9 * samples.DAY_US)
    rows: list[usage.Row] = [
        samples.row(request_id=f"q{n}", started_us=us) for n, us in enumerate(TIMES)
    ]
    write(folder, rows[:5])
    ship.ship(folder, later)
    compact.compact(folder, later)
    write(folder, rows[4:8])
    ship.ship(folder, later)
    write(folder, rows[7:])
    return folder


@pytest.mark.parametrize("first", [0, TIMES[1] + 1, TIMES[2], TIMES[3], TIMES[6]])
@pytest.mark.parametrize("last", [TIMES[3], TIMES[4], TIMES[6] - 1, TIMES[8], books.MAX_US])
def test_every_window_has_its_rows_once(state: Path, first: int, last: int) -> None:
    with books.Books(state).reading(first, last) as reading:
        assert reading.problems == ()
        found = reading.query("SELECT request_id FROM usage ORDER BY arrived_us")
    want = [f"q{n}" for n, us in enumerate(TIMES) if first <= us < last]
    assert [row["request_id"] for row in found] == want


def test_a_day_lies_within_a_window_that_has_all_of_it() -> None:
    day = schema.day_of(MIDNIGHT)
    end = MIDNIGHT + samples.DAY_US
    assert schema.lies_within(day, MIDNIGHT, end)
    assert not schema.lies_within(day, MIDNIGHT + 1, end)
    assert not schema.lies_within(day, MIDNIGHT, end - 1)
    assert schema.lies_within(schema.day_of(0), 0, books.MAX_US)
