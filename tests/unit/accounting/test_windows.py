"""Default windows and periods, where days are not all 24 hours long."""

import datetime
import itertools
import zoneinfo
from pathlib import Path

import pytest

from accounting import asking, windows
from scheduler.contracts import command_line, times
from scheduler.contracts.command_line import CommandError

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOW = datetime.datetime(2026, 11, 29, 22, 30, tzinfo=datetime.UTC)
HOUR = 3_600_000_000


def us(*parts: int, tz: datetime.tzinfo = BERLIN) -> int:
    hour, minute = (*parts[3:], 0, 0)[:2]
    at = datetime.datetime(parts[0], parts[1], parts[2], hour, minute, tzinfo=tz)
    return windows.to_us(at)


def test_facct_shows_today_and_all_time_for_named_jobs() -> None:
    today = windows.of_facct(None, None, now=NOW, tz=BERLIN, named=False)
    assert today == windows.Window(us(2026, 11, 29), windows.to_us(NOW) + 1)
    assert windows.of_facct(None, None, now=NOW, tz=BERLIN, named=True).start_us == 0
    given = windows.of_facct("2026-11-01", "2026-11-02T08:00", now=NOW, tz=BERLIN, named=True)
    assert given == windows.Window(us(2026, 11, 1), us(2026, 11, 2, 8))


def test_freport_shows_yesterday() -> None:
    assert windows.of_freport(None, None, now=NOW, tz=BERLIN) == windows.Window(
        us(2026, 11, 28), us(2026, 11, 29)
    )
    today = windows.of_freport("today", None, now=NOW, tz=BERLIN)
    assert today == windows.Window(us(2026, 11, 29), windows.to_us(NOW) + 1)


@pytest.mark.parametrize(("start", "end"), [("2026-11-02", "2026-11-01"), ("now-7d", None)])
def test_a_window_that_is_none_is_refused(start: str, end: str | None) -> None:
    with pytest.raises(command_line.CommandError):
        windows.of_facct(start, end, now=NOW, tz=BERLIN, named=False)


def test_days_around_the_end_of_summer_time_have_25_hours() -> None:
    window = windows.Window(us(2026, 10, 24), us(2026, 10, 27))
    borders = windows.periods(window, "day", BERLIN)
    assert [(b - a) // HOUR for a, b in itertools.pairwise(borders)] == [24, 25, 24]
    assert len(windows.periods(window, "hour", BERLIN)) == 73 + 1
    spring = windows.Window(us(2026, 3, 29), us(2026, 3, 30))
    assert (spring.end_us - spring.start_us) // HOUR == 23


def test_months_and_windows_that_begin_in_the_middle() -> None:
    window = windows.Window(us(2026, 11, 28, 13), us(2027, 1, 2))
    assert windows.periods(window, "month", BERLIN) == [
        window.start_us,
        us(2026, 12, 1),
        us(2027, 1, 1),
        window.end_us,
    ]
    assert windows.of_month("2026-12", BERLIN) == windows.Window(us(2026, 12, 1), us(2027, 1, 1))
    for bad in ("2026-13", "2026-1", "now"):
        with pytest.raises(command_line.CommandError, match="write it as 2026-11"):
            windows.of_month(bad, BERLIN)


def test_hours_of_a_half_hour_zone_begin_there() -> None:
    india = zoneinfo.ZoneInfo("Asia/Kolkata")
    window = windows.Window(us(2026, 11, 1, 0, 10, tz=india), us(2026, 11, 1, 2, tz=india))
    assert windows.periods(window, "hour", india)[1] == us(2026, 11, 1, 1, tz=india)


def test_too_many_periods_are_refused() -> None:
    with pytest.raises(ValueError, match="take a longer one"):
        windows.periods(windows.Window(0, windows.to_us(NOW)), "hour", BERLIN)
    with pytest.raises(ValueError, match="hour, day or month"):
        windows.periods(windows.Window(0, 5), "week", BERLIN)


def test_zones_have_names_that_come_back() -> None:
    odd = datetime.timezone(-datetime.timedelta(hours=3, minutes=30))
    assert windows.zone_name(BERLIN, NOW) == "Europe/Berlin"
    assert windows.zone_name(odd, NOW) == "-03:30"
    assert windows.zone("-03:30").utcoffset(None) == odd.utcoffset(None)
    assert windows.zone("Europe/Berlin") == BERLIN
    for bad in ("Mars/Olympus", "../etc/passwd", ""):
        with pytest.raises(ValueError, match="no time zone"):
            windows.zone(bad)


def test_the_machines_own_zone_has_rules(tmp_path: Path) -> None:
    link = tmp_path / "localtime"
    link.symlink_to(f"{zoneinfo.TZPATH[0]}/Europe/Berlin")
    assert times.local_zone({}, link) == BERLIN
    assert times.local_zone({"TZ": ":Asia/Kolkata"}, link) == zoneinfo.ZoneInfo("Asia/Kolkata")
    assert times.local_zone({"TZ": "nonsense"}, link) == datetime.UTC
    assert times.local_zone({}, tmp_path / "none") == datetime.UTC


def test_what_is_named_is_shown_although_its_clock_was_ahead() -> None:
    """`-j` is all time; what is later than the last day of a calendar is printed as unknown."""
    window = windows.of_facct(None, None, now=NOW, tz=datetime.UTC, named=True)
    assert window == windows.Window(0, windows.END_US)
    assert asking.window_text(window, datetime.UTC) == "Window: the beginning - the end (UTC)"
    until = windows.of_facct(None, "now", now=NOW, tz=datetime.UTC, named=True)
    assert until.end_us == windows.to_us(NOW)
    assert [times.print_point(us, datetime.UTC) for us in (times.LAST_US, 2**63 - 1)] == [
        "Unknown"
    ] * 2


@pytest.mark.parametrize(
    "text", ["0001-01", "1969-12", "1970-01", "9999-01", "٢٠٢٦-11", "2026-1", "2026-13"]
)
def test_months_that_no_bill_has_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="invalid month"):
        windows.of_month(text, datetime.UTC)


def test_a_window_from_before_1970_begins_there() -> None:
    found = windows.of_freport("0001-01-01", "1970-01-02", now=NOW, tz=datetime.UTC)
    assert found == windows.Window(0, 86_400_000_000)
    with pytest.raises(CommandError, match="nothing is recorded before 1970"):
        windows.of_freport("0001-01-01", "1969-12-31", now=NOW, tz=datetime.UTC)
