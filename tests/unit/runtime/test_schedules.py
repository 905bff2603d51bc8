"""Schedules: which floors are in force at any moment, over weekends, midnights and changes of the clock."""

import dataclasses
import datetime
import zoneinfo

import pytest

from scheduler.core import floors
from scheduler.runtime import entries, live, recalling, schedules

WEEKDAYS = schedules.Schedule("day", "chat", 8, "0 8 * * mon-fri", "18:00", "Europe/Berlin")


def us(text: str) -> int:
    return round(datetime.datetime.fromisoformat(text).timestamp() * 1_000_000)


def at(text: str, schedule: schedules.Schedule = WEEKDAYS) -> list[tuple[float, float]]:
    """Return start and end of its floors, hours from now."""
    found = schedules.in_force([schedule], us(text))
    return [(one.starts_s / 3600, one.ends_s / 3600) for one in found]


def test_in_force_before_and_after() -> None:
    assert at("2026-11-30T12:00+01:00") == [(-4, 6), (20, 30)]  # a Monday
    assert at("2026-11-30T07:30+01:00") == [(0.5, 10.5), (24.5, 34.5)]
    assert at("2026-11-27T18:00+01:00") == []  # Friday evening: nothing within a day
    assert at("2026-11-29T20:00+01:00") == [(12, 22)]
    (one, _) = schedules.in_force([WEEKDAYS], us("2026-11-30T12:00+01:00"))
    assert one == floors.Floor("day", "chat", 8, -4 * 3600, 6 * 3600)


def test_one_that_ends_after_midnight() -> None:
    night = schedules.Schedule("night", "chat", 2, "30 22 * * *", "06:00")
    assert at("2026-11-30T05:00+00:00", night)[0] == (-6.5, 1)
    assert at("2026-11-30T06:00+00:00", night)[0] == (16.5, 24)


def test_on_the_days_when_the_clock_changes_the_wall_clock_counts() -> None:
    """29 March 2026 has 23 hours in Berlin, 25 October 25."""
    daily = schedules.Schedule("all", "chat", 1, "0 0 * * *", "12:00", "Europe/Berlin")
    assert at("2026-03-29T00:00+01:00", daily)[0] == (0, 11)
    assert at("2026-10-25T00:00+02:00", daily)[0] == (0, 13)
    gone = schedules.Schedule("gap", "chat", 1, "30 2 * * *", "04:00", "Europe/Berlin")
    spans = at("2026-03-29T00:00+01:00", gone)
    assert len(spans) >= 1
    assert all(end > start for start, end in spans)
    twice = at(
        "2026-10-25T00:00+02:00", gone
    )  # 02:30 comes twice; the floor ends at 04:00 all the same
    assert {round(end, 6) for start, end in twice if start < 6} == {5.0}


@pytest.mark.parametrize(
    ("field", "days"),
    [("0", "Sun"), ("7", "Sun"), ("1", "Mon"), ("1-5", "Mon Tue Wed Thu Fri"), ("0-2", "Sun Mon Tue"),
     ("6,0", "Sat Sun"), ("MON", "Mon"), ("sun-mon", "Sun Mon"), ("0-0", "Sun")],
)  # fmt: skip
def test_days_of_the_week_count_as_in_cron(field: str, days: str) -> None:
    schedule = schedules.Schedule("s", "chat", 1, f"0 8 * * {field}", "9:00")
    now = datetime.datetime(2026, 11, 29, tzinfo=datetime.UTC)  # a Sunday
    week = [begin for begin in schedule.next(now, 10) if begin < now + datetime.timedelta(days=7)]
    assert {f"{begin:%a}" for begin in week} == set(days.split())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cron": "0 8 * *"}, "write five fields"),
        ({"cron": "61 8 * * *"}, "cron '61 8 \\* \\* \\*'"),
        ({"cron": "0 8 * * 8"}, "day of the week 8"),
        ({"cron": "0 8 1 * mon"}, "not both"),
        ({"until": "25:00"}, "until '25:00': write HH:MM"),
        ({"until": "18"}, "write HH:MM"),
        ({"zone": "Mars/Olympus"}, "time zone 'Mars/Olympus' is unknown"),
        ({"zone": "../etc/passwd"}, "time zone"),
        ({"floor": 0}, "must be 1 or more"),
        ({"cron": "0 8 30 2 *"}, "never comes"),
    ],
)
def test_what_can_not_be_used_says_why(changes: dict[str, object], fault: str) -> None:
    given = {"name": "s", "model": "chat", "floor": 1, "cron": "0 8 * * *", "until": "18:00"}
    with pytest.raises(ValueError, match=fault):
        schedules.Schedule(**{**given, **changes}).check()  # type: ignore[arg-type] # bad on purpose


def test_a_paused_one_says_nothing() -> None:
    paused = schedules.Schedule("p", "chat", 1, "* * * * *", "18:00", paused=True)
    assert schedules.in_force([paused], us("2026-11-30T12:00+00:00")) == ()


def test_one_that_this_host_can_not_read_is_said_once_and_hides_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its time zone was unknown to the broker's host alone: no plan was made there any more."""
    now_us, picture = us("2026-11-30T12:00+01:00"), live.Live(1, "a", entries.Pauses(1, 60), 0.0)
    odd = dataclasses.replace(WEEKDAYS, name="odd", zone="Europe/Atlantis")
    picture.timetable = (odd, WEEKDAYS)
    for _ in range(2):
        recalling._schedules(picture, now_us)
    assert picture.scheduled == schedules.in_force([WEEKDAYS], now_us)
    (line,) = caplog.messages
    assert line.startswith("schedule odd: time zone 'Europe/Atlantis' is unknown; write one as")


def began(schedule: schedules.Schedule, since: str, now: str) -> list[str]:
    """Return what began from ``since`` to ``now``, in Berlin's time."""
    looked = dataclasses.replace(schedule, since_us=us(since))
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    return [
        schedules.utc(begin).astimezone(zone).strftime("%a %H:%M")
        for begin, end in schedules.due(looked, us(now))
        if end > begin
    ]


def test_what_began_since_the_last_look_is_due_once() -> None:
    monday = "2026-11-30T08:00+01:00"
    assert began(WEEKDAYS, "2026-11-30T07:59+01:00", monday) == ["Mon 08:00"]
    assert began(WEEKDAYS, monday, monday) == ["Mon 08:00"]
    looked = dataclasses.replace(WEEKDAYS, since_us=us(monday) + 1)
    assert schedules.due(looked, us("2026-11-30T17:00+01:00")) == []
    assert began(WEEKDAYS, "2026-11-27T07:00+01:00", "2026-12-01T09:00+01:00") == [
        "Fri 08:00", "Mon 08:00", "Tue 08:00",
    ]  # fmt: skip
    paused = dataclasses.replace(WEEKDAYS, paused=True)
    assert began(paused, "2026-11-27T07:00+01:00", "2026-12-01T09:00+01:00") == []


def test_what_is_due_is_bounded_however_long_nobody_looked() -> None:
    assert len(began(WEEKDAYS, "2020-01-01T00:00+01:00", "2026-11-29T12:00+01:00")) == 5
    often = schedules.Schedule("often", "chat", 1, "*/5 * * * *", "00:00")
    hourly = dataclasses.replace(often, cron="0 * * * *", until="00:00")
    assert len(began(hourly, "2020-01-01T00:00+01:00", "2026-11-29T12:00+01:00")) <= 8


def test_a_beginning_in_the_hour_that_comes_twice_or_never_is_due_once() -> None:
    gap = schedules.Schedule("gap", "chat", 1, "30 2 * * *", "04:00", "Europe/Berlin")
    assert began(gap, "2026-10-25T00:00+02:00", "2026-10-25T23:00+01:00") == ["Sun 02:30"]
    assert len(began(gap, "2026-03-29T00:00+01:00", "2026-03-29T23:00+02:00")) <= 1
    daily = schedules.Schedule("all", "chat", 1, "0 0 * * *", "12:00", "Europe/Berlin")
    assert began(daily, "2026-10-24T01:00+02:00", "2026-10-27T01:00+01:00") == [
        "Sun 00:00", "Mon 00:00", "Tue 00:00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("noted", "timing", "warm"),
    [(59, "on time", "6/8"), (61, "late", "6/8"), (3600, "missed", "-")],
)
def test_how_late_a_beginning_was_noticed(noted: int, timing: str, warm: str) -> None:
    begins = us("2026-11-30T08:00+01:00")
    at_us = begins + noted * 1_000_000
    made = schedules.Firing("day", "chat", 8, begins, begins + 3600 * 1_000_000, at_us, serving=6)
    assert (made.timing, made.warm) == (timing, warm)
