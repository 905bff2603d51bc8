"""Forecasts from a ledger: two weeks, a day, holes, clock changes, a holiday, and what is read anew."""

import datetime
import zoneinfo
from collections.abc import Callable, Mapping

import pytest

from scheduler.contracts import ports
from scheduler.core import forecast
from scheduler.runtime import forecasts

UTC = datetime.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
QUARTER_US = 900_000_000
DAY_US = 86_400_000_000
LAG_US = forecasts.ROLLED_US


class Ledger:
    """What arrived by a rule of the local time; it notes what it was asked for."""

    def __init__(
        self, rule: Callable[[datetime.datetime], float], zone: datetime.tzinfo = UTC
    ) -> None:
        self.rule, self.zone = rule, zone
        self.asked: list[tuple[int, int]] = []
        self.fault = ""

    def quarters(self, first_us: int, last_us: int) -> Mapping[str, Mapping[int, ports.Arrived]]:
        if self.fault:
            raise OSError(self.fault)
        self.asked.append((first_us, last_us))
        found = {}
        for at_us in range(first_us, last_us, QUARTER_US):
            requests = self.rule(datetime.datetime.fromtimestamp(at_us / 1e6, self.zone)) * 900
            if requests:
                found[at_us] = ports.Arrived(requests, 2.0)
        return {"chat": found} if found else {}


def office(at: datetime.datetime) -> float:
    """100 requests/s from 8 to 18 on working days, 1/s else."""
    return 100.0 if at.weekday() < 5 and 8 <= at.hour < 18 else 1.0


def us(zone: datetime.tzinfo, *when: int) -> int:
    year, month, day, hour, minute = (*when, 0, 0)[:5]
    return (
        int(datetime.datetime(year, month, day, hour, minute, tzinfo=zone).timestamp()) * 1_000_000
    )


def learned(
    ledger: Ledger, now_us: int, days: int = 14
) -> tuple[forecasts.Learned, Callable[..., forecast.Guess]]:
    found = forecasts.Forecasts(ledger, ledger.zone, days).refresh(now_us + LAG_US)

    def at(*when: int) -> forecast.Guess:
        guess = found.curves["chat"].at(forecasts.local_s(us(ledger.zone, *when), ledger.zone))
        assert guess is not None
        return guess

    return found, at


def test_two_weeks_tell_mornings_from_nights_and_working_days_from_weekends() -> None:
    found, at = learned(Ledger(office), us(UTC, 2026, 11, 30))
    assert found.curves["chat"].days == 14
    assert found.held_s == {"chat": 2.0}
    assert at(2026, 12, 1, 10).mean == pytest.approx(100)
    assert at(2026, 12, 1, 4).mean == pytest.approx(1)
    assert at(2026, 12, 5, 10).mean == pytest.approx(1)
    assert at(2026, 12, 1, 10).sure > forecast.TRUSTED
    assert at(2026, 12, 1, 7, 45).mean == pytest.approx(1)


def test_one_day_is_believed_with_a_margin_and_less_sure() -> None:
    now = us(UTC, 2026, 11, 25)
    first = us(UTC, 2026, 11, 24)
    one = Ledger(lambda at: office(at) if at.timestamp() * 1e6 >= first else 0.0)
    found, at = learned(one, now)
    _, longer = learned(Ledger(office), now)
    assert found.curves["chat"].days == 1
    assert at(2026, 11, 25, 10).upper > 1.4 * at(2026, 11, 25, 10).mean
    assert at(2026, 11, 25, 10).sure < longer(2026, 11, 25, 10).sure


def test_an_outage_teaches_nothing() -> None:
    """Nothing at all from Tuesday noon to Wednesday noon, of two weeks."""
    down = (us(UTC, 2026, 11, 17, 12), us(UTC, 2026, 11, 18, 12))
    ledger = Ledger(lambda at: 0.0 if down[0] <= at.timestamp() * 1e6 < down[1] else office(at))
    found, at = learned(ledger, us(UTC, 2026, 11, 30))
    _, whole = learned(Ledger(office), us(UTC, 2026, 11, 30))
    assert found.holes == 96
    assert at(2026, 12, 1, 14).mean == pytest.approx(100)
    assert at(2026, 12, 1, 14).sure >= 0.9 * whole(2026, 12, 1, 14).sure


def test_a_weekend_without_anybody_is_no_outage() -> None:
    closed = Ledger(lambda at: office(at) if office(at) > 1 else 0.0)
    found, at = learned(closed, us(UTC, 2026, 11, 30))
    assert found.holes == 0
    assert at(2026, 12, 5, 10).mean == 0
    assert at(2026, 12, 1, 3).mean == 0
    assert at(2026, 12, 1, 9).mean == pytest.approx(100)


def test_a_holiday_on_a_monday_does_not_empty_the_next_one() -> None:
    def with_holiday(at: datetime.datetime) -> float:
        return 0.3 if (at.month, at.day) == (11, 23) else office(at)

    _, at = learned(Ledger(with_holiday), us(UTC, 2026, 11, 30))
    assert at(2026, 11, 30, 10).upper >= 100  # what is possible covers an ordinary Monday
    assert at(2026, 11, 30, 10).sure < at(2026, 12, 1, 10).sure  # and it says that it is less sure


@pytest.mark.parametrize(
    ("now", "day"), [((2026, 11, 2), (2026, 11, 2)), ((2026, 4, 6), (2026, 4, 6))]
)
def test_callers_follow_the_wall_clock_through_a_change_of_it(
    now: tuple[int, int, int], day: tuple[int, int, int]
) -> None:
    """The clock of Berlin went back on 25 October 2026 and forth on 29 March: eight stays eight."""
    _, at = learned(Ledger(office, BERLIN), us(BERLIN, *now))
    assert at(*day, 9).mean == pytest.approx(100)
    assert at(*day, 9).sure > 0.6
    assert at(*day, 7, 30).mean == pytest.approx(1)
    assert at(*day, 18, 30).mean == pytest.approx(1)


def test_only_what_is_new_is_read_and_a_lost_ledger_leaves_what_is_known() -> None:
    ledger = Ledger(office)
    kept = forecasts.Forecasts(ledger, UTC, 14)
    now = us(UTC, 2026, 11, 30)
    kept.refresh(now + LAG_US)
    before = kept.refresh(now + LAG_US + QUARTER_US)
    assert ledger.asked == [
        (now - 14 * DAY_US, now),
        (now - forecasts.LATE_US, now + QUARTER_US),
    ]
    ledger.fault = "accounting.duckdb: another process holds it open"
    after = kept.refresh(now + LAG_US + 2 * QUARTER_US)
    assert after.error == ledger.fault
    assert after.curves is before.curves
    ledger.fault = ""
    assert kept.refresh(now + LAG_US + 3 * QUARTER_US).error == ""


def test_what_is_shown_covers_the_next_day_by_the_hour_and_says_what_counts() -> None:
    now = us(UTC, 2026, 11, 30)
    found, _ = learned(Ledger(office), now)
    told = forecasts.told(found, UTC, now, 14)
    (chat,) = told["models"]
    assert [len(chat["hours"]), chat["days"], told["zone"]] == [25, 14, "UTC"]
    assert chat["hours"][9]["mean"] == pytest.approx(100)
    assert all(hour["counts"] for hour in chat["hours"])
    assert forecasts.told(forecasts.Learned(), UTC, now, 14)["models"] == []
