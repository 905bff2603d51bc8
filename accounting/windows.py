"""Which window a report covers, and its periods: days and months of a place, daylight saving included."""

import dataclasses
import datetime
import re
import zoneinfo

from scheduler.contracts import times
from scheduler.contracts.command_line import CommandError

END_US = 2**63 - 1  # not included in any window
UNITS = ("hour", "day", "month")
_OFFSET = re.compile(r"([+-])(\d\d):(\d\d)", re.ASCII)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_PERIODS_AT_MOST = 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """From `start_us` up to, not including, `end_us` (UTC µs)."""

    start_us: int
    end_us: int


def to_us(moment: datetime.datetime) -> int:
    """Return an aware time as UTC µs, without a float on the way."""
    delta = moment.astimezone(datetime.UTC) - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def moment(us: int) -> datetime.datetime:
    """Return UTC µs as an aware time, without a float on the way."""
    return _EPOCH + datetime.timedelta(microseconds=us)


def of_facct(
    start: str | None, end: str | None, *, now: datetime.datetime, tz: datetime.tzinfo, named: bool
) -> Window:
    """Return facct's window: as given, else from midnight to now, else (jobs named) all time.

    All time has no end: what was named is shown also if the clock that dated it was ahead.

    Raises:
        CommandError: a time can't be read, or the window is empty.
    """
    local = now.astimezone(tz)
    midnight = datetime.datetime.combine(local.date(), datetime.time(), tz)
    first = 0 if start is None and named else to_us(midnight)
    if start is not None:
        first = to_us(_point(start, now, tz))
    last = to_us(now) + 1 if start is not None or not named else END_US
    if end is not None:
        last = to_us(_point(end, now, tz))
    return _checked(first, last)


def of_freport(
    start: str | None, end: str | None, *, now: datetime.datetime, tz: datetime.tzinfo
) -> Window:
    """Return freport's window: as given, else yesterday.

    Raises:
        CommandError: a time can't be read, or the window is empty.
    """
    today = now.astimezone(tz).date()
    yesterday = datetime.datetime.combine(today - datetime.timedelta(days=1), datetime.time(), tz)
    midnight = datetime.datetime.combine(today, datetime.time(), tz)
    first = to_us(_point(start, now, tz)) if start is not None else to_us(yesterday)
    last = to_us(midnight)
    if end is not None:
        last = to_us(_point(end, now, tz))
    elif start is not None and first >= last:  # `-S today`: up to now
        last = to_us(now) + 1
    return _checked(first, last)


def of_month(text: str, tz: datetime.tzinfo) -> Window:
    """Return the window of ``YYYY-MM``.

    Raises:
        CommandError: it is no month.
    """
    match = re.fullmatch(r"(\d{4})-(\d\d)", text, re.ASCII)
    if match is None or not 1 <= int(match[2]) <= 12 or not 1 <= int(match[1]) <= 9998:
        raise CommandError(f"invalid month {text!r}: write it as 2026-11")
    first = datetime.date(int(match[1]), int(match[2]), 1)
    if first < _EPOCH.date() + datetime.timedelta(
        days=1
    ):  # in zones east of UTC January began before
        raise CommandError(f"invalid month {text!r}: nothing is recorded before 1970")
    return Window(_midnight(first, tz), _midnight(_next_month(first), tz))


def _checked(first: int, last: int) -> Window:
    if last <= 0:
        raise CommandError("nothing is recorded before 1970: give a later end with -E")
    first = max(0, first)
    if last <= first:
        raise CommandError("the end time is not after the start time: give -S and -E in order")
    return Window(first, last)


def _point(text: str, now: datetime.datetime, tz: datetime.tzinfo) -> datetime.datetime:
    try:
        return times.point(text, now=now, tz=tz, past=True)
    except times.TimeError as error:
        raise CommandError(str(error)) from error


def periods(window: Window, unit: str, tz: datetime.tzinfo) -> list[int]:
    """Return the borders of the window's hours, days or months in ``tz``, the window's own included.

    Raises:
        ValueError: there would be too many, or the unit is unknown.
    """
    if unit not in UNITS:
        raise ValueError(f"no period is called {unit!r}: hour, day or month")
    borders = [window.start_us]
    start = moment(window.start_us).astimezone(tz)
    if unit == "hour":
        into = (start.minute * 60 + start.second) * 1_000_000 + start.microsecond
        border = window.start_us - into + 3_600_000_000
        while border < window.end_us and len(borders) <= _PERIODS_AT_MOST:
            borders.append(border)
            border += 3_600_000_000
    else:
        date = _next(start.date(), unit)
        while (border := _midnight(date, tz)) < window.end_us and len(borders) <= _PERIODS_AT_MOST:
            borders.append(border)
            date = _next(date, unit)
    if len(borders) > _PERIODS_AT_MOST:
        raise ValueError(f"more than {_PERIODS_AT_MOST} periods of one {unit}: take a longer one")
    return [*borders, window.end_us]


def _next(date: datetime.date, unit: str) -> datetime.date:
    return _next_month(date) if unit == "month" else date + datetime.timedelta(days=1)


def _next_month(date: datetime.date) -> datetime.date:
    return (date.replace(day=28) + datetime.timedelta(days=4)).replace(day=1)


def _midnight(date: datetime.date, tz: datetime.tzinfo) -> int:
    return to_us(datetime.datetime.combine(date, datetime.time(), tz))


def zone_name(tz: datetime.tzinfo, now: datetime.datetime) -> str:
    """Return how a zone is told to the server: its name, or its offset now."""
    if isinstance(tz, zoneinfo.ZoneInfo) and tz.key:
        return tz.key
    minutes = round((tz.utcoffset(now) or datetime.timedelta()).total_seconds() / 60)
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"


def zone(name: str) -> datetime.tzinfo:
    """Return the zone of a name or offset that `zone_name` made.

    Raises:
        ValueError: there is no such zone.
    """
    match = _OFFSET.fullmatch(name)
    if match is not None:
        minutes = int(match[2]) * 60 + int(match[3])
        return datetime.timezone(
            datetime.timedelta(minutes=-minutes if match[1] == "-" else minutes)
        )
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"no time zone is called {name!r}") from error
