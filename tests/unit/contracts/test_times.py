"""Slurm's times and durations: every example of the command-line conventions."""

import datetime
import zoneinfo

import pytest

from scheduler.contracts import times

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOW = datetime.datetime(2026, 11, 29, 22, 0, tzinfo=BERLIN)


def _point(text: str, *, past: bool = True) -> str:
    return times.point(text, now=NOW, tz=BERLIN, past=past).strftime("%Y-%m-%dT%H:%M:%S")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", "2026-11-29T22:00:00"),
        ("now-7days", "2026-11-22T22:00:00"),
        ("now - 1 hour", "2026-11-29T21:00:00"),
        ("now-90", "2026-11-29T21:58:30"),
        ("now+2weeks", "2026-12-13T22:00:00"),
        ("now-1second", "2026-11-29T21:59:59"),
        ("now-3minutes", "2026-11-29T21:57:00"),
        ("today", "2026-11-29T00:00:00"),
        ("tomorrow", "2026-11-30T00:00:00"),
        ("yesterday", "2026-11-28T00:00:00"),
        ("midnight", "2026-11-29T00:00:00"),
        ("noon", "2026-11-29T12:00:00"),
        ("teatime", "2026-11-29T16:00:00"),
        ("16:00", "2026-11-29T16:00:00"),
        ("12:05am", "2026-11-29T00:05:00"),
        ("2026-11-01", "2026-11-01T00:00:00"),
        ("2026-11-1", "2026-11-01T00:00:00"),
        ("2026-11-01T08:00", "2026-11-01T08:00:00"),
        ("2026-11-01 08:00", "2026-11-01T08:00:00"),
        ("2026-11-01-08:00", "2026-11-01T08:00:00"),
        ("2026-11-01T08:00:59", "2026-11-01T08:00:59"),
        ("1101", "2026-11-01T00:00:00"),
        ("110126", "2026-11-01T00:00:00"),
        ("1231", "2025-12-31T00:00:00"),
        ("0229", "2024-02-29T00:00:00"),
        ("uts1700000000", "2023-11-14T23:13:20"),
    ],
)
def test_points_of_a_report(text: str, expected: str) -> None:
    assert _point(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16:00", "2026-11-30T16:00:00"),
        ("23:30", "2026-11-29T23:30:00"),
        ("midnight", "2026-11-30T00:00:00"),
        ("1231", "2026-12-31T00:00:00"),
        ("1101", "2027-11-01T00:00:00"),
    ],
)
def test_points_to_come(text: str, expected: str) -> None:
    assert _point(text, past=False) == expected


def test_zones_are_taken_as_written() -> None:
    for text, offset in (("2026-11-01T08:00Z", 0), ("2026-11-01T08:00+02:00", 2)):
        point = times.point(text, now=NOW, tz=BERLIN)
        assert point.utcoffset() == datetime.timedelta(hours=offset)
        assert point.hour == 8


def test_a_time_that_comes_twice_in_a_night_is_the_one_to_come() -> None:
    """At the second 2:10 of the night, 2:30 is in 20 minutes and not 40 minutes ago."""
    for fold, ahead_s in ((0, 1_200), (1, 1_200)):
        now = datetime.datetime(2026, 10, 25, 2, 10, fold=fold, tzinfo=BERLIN)
        assert times.point("2:30", now=now, tz=BERLIN).timestamp() - now.timestamp() == ahead_s


def test_hours_before_are_hours_also_when_the_clocks_change() -> None:
    now = datetime.datetime(2026, 10, 25, 4, 0, tzinfo=BERLIN)  # clocks went back at 3:00
    moved = times.point("now-3hours", now=now, tz=BERLIN)
    assert (now.astimezone(datetime.UTC) - moved.astimezone(datetime.UTC)).total_seconds() == 10_800


@pytest.mark.parametrize(
    "text",
    [
        "now-7d", "9pm", "13:00pm", "24:00", "2026-1-1", "11/01/2026", "1700000000", "2026-02-30",
        "2026-13-01", "", "soon", "now-", "now-99999999999999", "0230", "2026-11-01T25:00",
        "2026-11-01T08:00+99:00",
    ],
)  # fmt: skip
def test_what_is_no_point(text: str) -> None:
    with pytest.raises(times.TimeError):
        _point(text)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("5", "00:05:00"), ("30:15", "00:31:00"), ("1:02:03", "01:03:00"), ("2-12", "2-12:00:00"),
        ("3-0:00", "3-00:00:00"), ("1-2:3:4", "1-02:04:00"), ("25:61:61", "1-02:03:00"),
        ("0", "UNLIMITED"), ("-1", "UNLIMITED"), ("infinite", "UNLIMITED"), ("UNLIMITED", "UNLIMITED"),
    ],
)  # fmt: skip
def test_durations(text: str, printed: str) -> None:
    assert times.print_duration(times.duration(text)) == printed


@pytest.mark.parametrize(
    ("text", "seconds"), [("4:00", 4 * 60), ("2-12", 60 * 3600), ("3-0:00", 72 * 3600)]
)
def test_b7_durations_are_not_guessed(text: str, seconds: int) -> None:
    assert times.duration(text) == seconds


@pytest.mark.parametrize("text", ["2-", "1h", "1:", "1-2-3", "", "-5", "1:2:3:4", "٣", "1-2:3:4:5"])
def test_b7_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(times.TimeError, match="D-HH"):
        times.duration(text)


def test_times_print_as_sacct_does() -> None:
    assert times.print_point(0, datetime.UTC) == "Unknown"
    assert times.print_point(1_700_000_000_000_000, BERLIN) == "2023-11-14T23:13:20"
    assert times.print_duration(93_784.9) == "1-02:03:04"
