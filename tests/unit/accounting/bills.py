"""What the tests of bills have in common: an office with prices, months, and how one is closed."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from accounting import (
    bill,
    billing,
    rates,
    settings,
    ship,
    spool,
)
from scheduler.contracts import clock
from tests.unit.accounting import world


def us(text: str) -> int:
    return round(datetime.datetime.fromisoformat(text + "+00:00").timestamp()) * 1_000_000


NOV, DEC, JAN = us("2026-11-01T00:00:00"), us("2026-12-01T00:00:00"), us("2027-01-01T00:00:00")
LATER = us("2027-01-02T00:00:00")


def write(state: Path, name: str, *rows: Any) -> None:
    sink = spool.Spool(state / "spool" / name, name, clock=clock.FakeClock())
    for row in rows:
        sink.append(row)
    sink.close()


@pytest.fixture
def office(tmp_path: Path) -> billing.Billing:
    """The world of November, with a price for output, and another one from noon of the 27th on."""
    world.write(tmp_path)
    made = billing.Billing(tmp_path, settings.Accounting())
    made.add_rates(
        rates.body("*", "*", {rates.Use.OUTPUT: 1_000_000, rates.Use.UNCACHED: 100_000}, NOV),
        author="ops", reason="first", now_us=NOV,
    )  # fmt: skip
    return made


OPEN_US = round(settings.Accounting().open_at_most_s * 1e6)


def close(office: billing.Billing, month: str, end_us: int) -> bill.Closed:
    """Close a month once its last attempts are over and everything is shipped."""
    now_us = end_us + OPEN_US
    ship.ship(office._books.state_dir, clock.FakeClock(wall_us=now_us))
    return office.close(month, author="ops", reason="", now_us=now_us)
