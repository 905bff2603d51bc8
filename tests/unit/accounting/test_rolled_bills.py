"""A bill says the same from rollups as from the records, wherever its periods are cut."""

import datetime
from pathlib import Path

import pytest

from accounting import billing, books, rates, rolling, settings, ship, spool
from scheduler.contracts import clock
from tests.unit.accounting import samples

DAY = 86_400_000_000
OUTPUT = rates.Use.OUTPUT


def us(text: str) -> int:
    return round(datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()) * 1_000_000


def served(state: Path, name: str, *moments: int) -> None:
    writer = spool.Spool(state / "spool" / name, name, clock=clock.FakeClock())
    for at in moments:
        row = {"started_us": at, "arrived_us": at, "output_tokens": 1_000}
        writer.append(samples.row("close", f"{name}-{at}", **row))
    writer.close()


def rolled(state: Path, now_us: int) -> None:
    time = clock.FakeClock(wall_us=now_us)
    ship.ship(state, time)
    rolling.roll(books.Books(state), time)


@pytest.mark.parametrize(
    ("zone", "changes", "total"),
    [
        ("UTC", ("2026-11-02T00:30:00",), 5_000_000),
        ("UTC", ("2026-11-01T00:30:00", "2026-11-02T12:00:01", "2026-11-02T23:59:59"), None),
        ("Asia/Kolkata", (), 3_000_000),
    ],
)
def test_rollups_change_no_bill_and_leave_nothing_for_the_next(
    tmp_path: Path, zone: str, changes: tuple[str, ...], total: int | None
) -> None:
    made = billing.Billing(tmp_path, settings.Accounting(time_zone=zone))
    begin = us("2026-11-01T00:00:00")
    for number, since in enumerate((begin - 40 * DAY, *map(us, changes)), start=1):
        price = {OUTPUT: number * 1_000_000}
        made.add_rates(rates.body("*", "*", price, since), author="a", reason="r", now_us=since)
    served(tmp_path, "one", *(begin + n * DAY + DAY // 2 for n in range(3)))
    before = made.month("2026-11")
    rolled(tmp_path, begin + 4 * DAY)
    after = made.month("2026-11")
    assert (after.lines, after.problems) == (before.lines, ())
    closed = made.close("2026-11", author="a", reason="", now_us=us("2026-12-02T00:00:00"))
    assert closed.total == sum(line.cost for line in before.lines)
    assert total is None or closed.total == total
    served(tmp_path, "two", us("2026-12-01T12:00:00"), us("2026-12-02T12:00:00"))
    rolled(tmp_path, us("2026-12-03T00:00:00"))
    assert [line for line in made.month("2026-12").lines if line.late] == []
