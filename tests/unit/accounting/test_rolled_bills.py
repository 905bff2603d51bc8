"""A bill says the same from rollups as from the records, wherever its periods are cut."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from accounting import billing, books, manifest, rates, rolling, schema, settings, ship, spool
from scheduler.contracts import clock
from tests.unit.accounting import samples

HOUR = 3_600_000_000
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


def test_a_day_that_was_not_rolled_up_is_read_from_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = billing.Billing(tmp_path, settings.Accounting())
    begin = us("2026-11-01T00:00:00")
    served(tmp_path, "one", *(begin + n * DAY + DAY // 2 for n in range(4)))
    summed = rolling._sum

    def failing(records: books.Books, day: str, *more: Any) -> Any:
        if day == "2026-11-02":
            raise ValueError("no sum of it")
        return summed(records, day, *more)

    monkeypatch.setattr(rolling, "_sum", failing)
    rolled(tmp_path, begin + 5 * DAY)
    found = sum(line.amount for line in made.month("2026-11").lines if line.what == OUTPUT)
    assert found == 4_000
    served(tmp_path, "late", begin + DAY // 2)  # shipped into a day whose sums do not know it
    ship.ship(tmp_path, clock.FakeClock(wall_us=begin + 5 * DAY))
    found = sum(line.amount for line in made.month("2026-11").lines if line.what == OUTPUT)
    assert found == 5_000


def test_gpu_time_that_cannot_be_read_is_a_problem_of_the_bill(tmp_path: Path) -> None:
    made = billing.Billing(tmp_path, settings.Accounting())
    begin = us("2026-11-01T00:00:00")
    writer = spool.Spool(tmp_path / "spool" / "gpu", "gpu", clock=clock.FakeClock())
    writer.append(samples.gpu(start_us=begin + DAY))
    writer.close()
    served(tmp_path, "one", *(begin + n * DAY + DAY // 2 for n in range(4)))
    rolled(tmp_path, begin + 5 * DAY)
    kept = manifest.load(tmp_path / "parquet") or manifest.Manifest()
    (file,) = (each for each in kept.files if each.table == schema.GPU)
    (tmp_path / "parquet" / file.path).write_bytes(b"x")
    (problem,) = made.month("2026-11").problems
    assert "damaged or gone" in problem


def test_the_month_of_a_day_with_25_hours_has_each_hour_once(tmp_path: Path) -> None:
    """October in Berlin ends an hour later by UTC than it begins: each hour is on one bill."""
    made = billing.Billing(tmp_path, settings.Accounting(time_zone="Europe/Berlin"))
    prices = rates.body("*", "*", {OUTPUT: 1_000_000}, 1)
    made.add_rates(prices, author="a", reason="r", now_us=1)
    for first, hours in (("09-30T18", 8), ("10-24T22", 26), ("10-31T20", 7)):
        begin = us(f"2026-{first}:00:00")
        served(tmp_path, first[:5], *range(begin, begin + hours * HOUR, HOUR))
    months = ("2026-09", "2026-10", "2026-11")

    def billed() -> list[int]:
        return [sum(line.amount for line in made.month(month).lines) // 1_000 for month in months]

    assert billed() == [4, 4 + 26 + 3, 4]
    rolled(tmp_path, us("2026-11-02T00:00:00"))
    assert billed() == [4, 4 + 26 + 3, 4]
