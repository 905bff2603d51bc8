"""Closed months: they do not change, late rows are billed once, and what blocks a closing is named."""

from pathlib import Path
from typing import Any

import pytest

from accounting import (
    bill,
    billing,
    books,
    postings,
    rates,
    rolling,
    settings,
    ship,
)
from scheduler.contracts import clock, errors
from tests.unit.accounting import bills, samples, world

office = bills.office  # the fixture


def test_rows_for_a_month_that_is_no_longer_looked_at_are_told(tmp_path: Path) -> None:
    """Three closed months, one is looked at: what came late for the first is on no bill, and said."""
    office = billing.Billing(tmp_path, settings.Accounting(late_months=1))
    office.add_rates(
        rates.body("*", "*", {rates.Use.OUTPUT: 1}, 1), author="o", reason="r", now_us=1
    )  # fmt: skip
    days = [bills.us(f"2026-{month:02}-10T12:00:00") for month in (8, 9, 10, 11)]
    for number, at in enumerate(days):
        bills.write(
            tmp_path,
            f"w{number}",
            samples.row("close", f"q{number}", started_us=at, output_tokens=10),
        )
    for month, end in (("2026-08", "2026-09"), ("2026-09", "2026-10"), ("2026-10", "2026-11")):
        bills.close(office, month, bills.us(f"{end}-01T00:00:00"))
    time = clock.FakeClock(wall_us=bills.DEC)
    rolling.roll(books.Books(tmp_path), time)
    assert office.month("2026-11").doubtful == ()
    bills.write(
        tmp_path, "late", samples.row("close", "qq", started_us=days[0] + 1, output_tokens=7)
    )
    ship.ship(tmp_path, time)
    rolling.roll(books.Books(tmp_path), time)
    (told,) = office.month("2026-11").doubtful
    assert "2026-08: 7 tokens more than all bills say" in told
    wider = billing.Billing(tmp_path, settings.Accounting(late_months=3)).month("2026-11")
    assert wider.doubtful == ()
    assert [line.amount for line in wider.lines if line.late] == [7]


def test_a_closed_month_does_not_change_and_late_rows_are_billed_once(
    office: billing.Billing, tmp_path: Path
) -> None:
    before = office.month("2026-11")
    closed = bills.close(office, "2026-11", bills.DEC)
    assert (closed.total, closed.lines) == (bill.total(before.lines), len(before.lines))
    bills.write(tmp_path, "found", samples.row("close", "late", output_tokens=1_000))
    kept = office.month("2026-11")
    assert kept.closed is not None
    assert kept.lines == before.lines
    december = office.month("2026-12").lines
    assert [(x.used_month, x.amount, x.cost, x.late) for x in december] == [
        ("2026-11", 1_000, 1_000_000, True)
    ]
    assert office.month("2027-01").lines == ()
    bills.close(office, "2026-12", bills.JAN)
    assert office.month("2026-12").lines == december
    assert office.month("2027-01").lines == ()
    again = billing.Billing(tmp_path, settings.Accounting())  # another gateway says the same
    assert again.month("2026-12").lines == december


def test_a_closing_answers_with_its_own_month_whoever_closes_the_next(
    office: billing.Billing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = office._postings.append

    def overtaken(decide: Any) -> postings.Posting:
        made = append(decide)
        bills.close(billing.Billing(tmp_path, settings.Accounting()), "2026-12", bills.LATER)
        return made

    monkeypatch.setattr(office._postings, "append", overtaken)
    assert bills.close(office, "2026-11", bills.LATER).month == "2026-11"


def test_a_month_is_not_closed_while_rows_of_it_are_in_a_spool(
    office: billing.Billing, tmp_path: Path
) -> None:
    bills.write(tmp_path, "more", samples.row("close", "m", output_tokens=1))
    with pytest.raises(errors.BadRequest, match=r"2 spool segments .* not shipped.*try again"):
        office.close("2026-11", author="ops", reason="", now_us=bills.DEC + bills.OPEN_US)
    bills.close(office, "2026-11", bills.DEC)


def test_months_are_closed_once_in_order_and_not_before_their_end(office: billing.Billing) -> None:
    with pytest.raises(errors.BadRequest, match=r"close it after 2026-12-01T06:00:00 \(UTC\)"):
        bills.close(office, "2026-11", bills.DEC - 1)
    with pytest.raises(errors.BadRequest, match="2026-11 has usage, GPU time or"):
        bills.close(office, "2026-12", bills.JAN)
    bills.close(office, "2026-11", bills.DEC)
    with pytest.raises(errors.BadRequest, match="closed already"):
        bills.close(office, "2026-11", bills.DEC)
    with pytest.raises(errors.BadRequest, match="2026-12 is next"):
        bills.close(office, "2027-01", bills.us("2027-03-01T00:00:00"))


def test_a_row_of_the_far_future_is_named(office: billing.Billing, tmp_path: Path) -> None:
    far = 2**63 - 3_000_000
    bills.write(tmp_path, "far", samples.row("close", "far", started_us=far, output_tokens=9))
    made = office.month("2026-11")
    assert sum(line.amount for line in made.lines if line.what == "output") == 24
    assert made.doubtful == (
        "1 attempts are dated after 2100: a clock was wrong; they are on no bill: see "
        "`facct -S 2100-01-01 -E 9999-12-31`, and use `fctl adjust`",
    )


def test_a_row_of_1970_blocks_no_closing_and_is_named(
    office: billing.Billing, tmp_path: Path
) -> None:
    bills.write(
        tmp_path, "bad", samples.row("close", "bad", started_us=world.SECOND, output_tokens=1_000)
    )
    (told,) = office.month("2026-11").doubtful
    assert told.startswith("1 attempts and 0 GPU intervals are dated before 2000")
    bills.close(office, "2026-11", bills.DEC)
    december = office.month("2026-12")
    assert (december.lines, december.doubtful) == ((), (told,))


def test_gpu_time_and_adjustments_alone_are_a_month_to_close_first(
    office: billing.Billing, tmp_path: Path
) -> None:
    office.adjust("red", 7, "2026-09", author="ops", reason="x", now_us=bills.DEC)
    with pytest.raises(errors.BadRequest, match="2026-09 has usage, GPU time or adjustments"):
        bills.close(office, "2026-11", bills.DEC)
    bills.write(
        tmp_path, "gpu", samples.gpu(lease_id="l-8", start_us=bills.us("2026-08-05T00:00:00"))
    )
    with pytest.raises(errors.BadRequest, match="2026-08 has usage, GPU time or adjustments"):
        bills.close(office, "2026-09", bills.DEC)


def test_what_comes_before_the_first_closed_month_is_late_on_the_next_bill(
    office: billing.Billing, tmp_path: Path
) -> None:
    prices = rates.body(
        "*",
        "*",
        {rates.Use.GPU: 3_600_000_000, rates.Use.CACHED: 1},
        bills.us("2026-01-01T00:00:00"),
    )
    office.add_rates(prices, author="ops", reason="x", now_us=bills.us("2026-01-01T00:00:00"))
    bills.close(office, "2026-11", bills.DEC)
    begin = bills.us("2026-03-05T00:00:00")
    bills.write(
        tmp_path,
        "old",
        samples.gpu(lease_id="l-8", start_us=begin),
        samples.replica(
            "serving", begin, begin + 60 * world.SECOND, lease_id="l-8", dedicated="red"
        ),
        samples.row(
            "close", "old", started_us=bills.us("2026-04-01T00:00:00"), cached_prompt_tokens=1_000
        ),
    )
    late = office.month("2026-12").lines
    assert [(x.used_month, x.what, x.amount, x.late) for x in late] == [
        ("2026-03", "gpu", 240 * world.SECOND, True),
        ("2026-04", "cached_prompt", 1_000, True),
    ]
    bills.close(office, "2026-12", bills.JAN)
    assert office.month("2026-12").lines == late
    assert office.month("2027-01").lines == ()


def test_an_adjustment_that_no_bill_has_is_late_on_the_next(
    office: billing.Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.adjust("red", 7, "2026-09", author="ops", reason="x", now_us=bills.DEC)
    with monkeypatch.context() as patched:  # as an earlier release closed it
        patched.setattr(billing.Billing, "_first_month", lambda *_: "")
        bills.close(office, "2026-11", bills.DEC)
    (line,) = office.month("2026-12").lines
    assert (line.used_month, line.cost, line.late) == ("2026-09", 7, True)
    bills.close(office, "2026-12", bills.JAN)
    assert office.month("2027-01").lines == ()


def test_a_months_borders_are_the_sites_and_stay_when_the_zone_is_changed(tmp_path: Path) -> None:
    """2026-12-01 00:30 in Berlin is November in UTC; the night is billed once, whatever is set later."""
    bills.write(
        tmp_path,
        "g",
        samples.row("close", "n", started_us=bills.us("2026-11-30T23:30:00"), output_tokens=3),
    )
    berlin = billing.Billing(tmp_path, settings.Accounting(time_zone="Europe/Berlin"))
    assert berlin.month("2026-11").lines == ()
    bills.close(berlin, "2026-11", bills.DEC)
    utc = billing.Billing(tmp_path, settings.Accounting())
    assert [line.amount for line in utc.month("2026-12").lines] == [3]
    assert not any(line.late for line in utc.month("2026-12").lines)
