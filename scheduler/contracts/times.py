"""Slurm's spellings of points in time and of durations, read the same way by every command.

Where Slurm's way is a known trap we do better: 30 February is refused, not read as 2 March.
"""

import datetime
import math
import re
import zoneinfo
from collections.abc import Mapping
from pathlib import Path

MINUTE, HOUR, DAY, WEEK = 60, 3600, 86_400, 604_800
LAST_US = 253_402_214_400_000_000  # the last day of 9999, UTC: what comes later has no date
_UNITS = {"second": 1, "minute": MINUTE, "hour": HOUR, "day": DAY, "week": WEEK}
_NAMED_HOURS = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}
_NAMED_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}

_RELATIVE = re.compile(r"now(?:\s*([+-])\s*(\d{1,9})\s*([a-z]*))?", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(am|pm)?", re.ASCII)
_ISO = re.compile(
    r"(\d{4})-(\d{2})-(\d{1,2})(?:[t\s-]\s*(\d{1,2}:\d{2}(?::\d{2})?)(?:\.\d+)?\s*(z|[+-]\d{2}:?\d{2})?)?",
    re.ASCII,
)
_MMDD = re.compile(r"(\d{2})(\d{2})(\d{2})?", re.ASCII)
_MONTH_DAY = re.compile(r"(\d{1,2})([/.])(\d{1,2})(?:\2(\d{2}))?", re.ASCII)
_UTS = re.compile(r"uts(\d{1,12})", re.ASCII)

_EXAMPLES = "give now-7days, today, 16:00, 2026-11-01 or 2026-11-01T08:00"


class TimeError(ValueError):
    """A time or duration that can't be read; the message is one line: what, and what to write."""


def local_zone(env: Mapping[str, str], localtime: Path = Path("/etc/localtime")) -> datetime.tzinfo:
    """Return the reader's zone with its rules (``TZ``, else the machine's), not today's offset alone.

    UTC where neither says one that is known here.
    """
    name = env.get("TZ", "").removeprefix(":")
    try:
        name = name or str(localtime.resolve()).partition("zoneinfo/")[2]
        if name:
            return zoneinfo.ZoneInfo(name.removeprefix("posix/"))
        with localtime.open("rb") as file:  # a copy, and no link to one of a name
            return zoneinfo.ZoneInfo.from_file(file)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return datetime.UTC


def point(
    text: str, *, now: datetime.datetime, tz: datetime.tzinfo, past: bool = False
) -> datetime.datetime:
    """Read a point in time as ``-S``, ``-E``, ``--begin`` and ``--deadline`` take it.

    Args:
        text: relative (``now-7days``), a named day or hour, a time of day, a date, or both.
        now: the present, aware of its zone.
        tz: the zone in which ``text`` is meant, unless it says one.
        past: a report's time: a day without a year is the last such day, and a time of day is
            today's. Otherwise both are the next to come.

    Returns:
        The time, aware, in ``tz`` (or in the zone that ``text`` names).

    Raises:
        TimeError: it is none of these.
    """
    word = " ".join(text.lower().split())
    local = now.astimezone(tz)
    relative = _RELATIVE.fullmatch(word)
    if relative is not None:
        return _relative(relative, text, local)
    if word in _NAMED_DAYS:
        day = local.date() + datetime.timedelta(days=_NAMED_DAYS[word])
        return _at(day, datetime.time(), tz)
    seconds = _UTS.fullmatch(word)
    if seconds is not None:
        return datetime.datetime.fromtimestamp(int(seconds[1]), tz)
    clock = _clock(word, text)
    if clock is not None:
        return _next_clock(clock, local, past=past)
    iso = _ISO.fullmatch(word)
    if iso is not None:
        return _iso(iso, text, tz)
    return _short_date(word, text, local, past=past)


def duration(text: str) -> int | None:
    """Read a duration as ``--time`` takes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM[:SS].

    Returns:
        Whole seconds, rounded up to the next minute as Slurm does; None for unlimited (`0`, `-1`,
        `infinite`, `UNLIMITED`).

    Raises:
        TimeError: it is none of these (`1h`, `1:`, `2-`, `1-2-3`).
    """
    word = text.strip().lower()
    if word in {"-1", "infinite", "unlimited"}:
        return None
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,8})(?::(\d{1,8}))?(?::(\d{1,8}))?", word, re.ASCII)
    if match is None:
        raise TimeError(
            f"invalid time limit {text!r}: give minutes, MM:SS, HH:MM:SS, D-HH or D-HH:MM[:SS]"
        )
    days, *numbers = match.groups()
    parts = [int(number) for number in numbers if number is not None]
    units = (HOUR, MINUTE, 1) if days is not None or len(parts) == 3 else (MINUTE, 1, 0)
    seconds = int(days or 0) * DAY + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )
    return None if seconds == 0 else math.ceil(seconds / MINUTE) * MINUTE


def print_duration(seconds: float | None) -> str:
    """Print ``[D-]HH:MM:SS``, or ``UNLIMITED`` for None."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(max(0, int(seconds)), DAY)
    clock = f"{rest // HOUR:02d}:{rest % HOUR // MINUTE:02d}:{rest % MINUTE:02d}"
    return f"{days}-{clock}" if days else clock


def print_elapsed(seconds: float | None) -> str:
    """Print a duration as squeue does, ``[[D-]H:]M:SS``, or ``UNLIMITED`` for None."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(max(0, int(seconds)), DAY)
    hours, minutes = divmod(rest // MINUTE, 60)
    behind = f":{rest % MINUTE:02d}"
    if days:
        return f"{days}-{hours:02d}:{minutes:02d}{behind}"
    return f"{hours}:{minutes:02d}{behind}" if hours else f"{minutes}{behind}"


def print_point(microseconds: int, tz: datetime.tzinfo) -> str:
    """Print UTC µs as sacct does, ``2026-11-01T08:00:00`` in ``tz``; ``Unknown``: 0, or no date has it."""
    if not 0 < microseconds < LAST_US:
        return "Unknown"
    moment = datetime.datetime.fromtimestamp(microseconds // 1_000_000, tz)
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


def _refuse(text: str) -> TimeError:
    return TimeError(f"invalid time {text!r}: {_EXAMPLES}")


def _relative(match: re.Match[str], text: str, local: datetime.datetime) -> datetime.datetime:
    sign, number, unit = match.groups()
    if sign is None:
        return local
    if unit and unit not in _UNITS and unit.removesuffix("s") not in _UNITS:
        raise TimeError(f"invalid time {text!r}: units are seconds, minutes, hours, days and weeks")
    seconds = int(number) * (_UNITS.get(unit) or _UNITS.get(unit.removesuffix("s")) or 1)
    try:
        # Through UTC: an hour is 3,600 seconds also in the night when the clocks change.
        moved = local.astimezone(datetime.UTC) + datetime.timedelta(
            seconds=seconds if sign == "+" else -seconds
        )
        return moved.astimezone(local.tzinfo)
    except (OverflowError, ValueError):
        raise _refuse(text) from None


def _clock(word: str, text: str) -> datetime.time | None:
    if word in _NAMED_HOURS:
        return datetime.time(_NAMED_HOURS[word])
    match = _CLOCK.fullmatch(word)
    if match is None:
        return None
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    if match[4]:
        if not 1 <= hour <= 12:
            raise _refuse(text)
        hour = hour % 12 + (12 if match[4] == "pm" else 0)
    try:
        return datetime.time(hour, minute, second)
    except ValueError:
        raise _refuse(text) from None


def _at(day: datetime.date, clock: datetime.time, tz: datetime.tzinfo) -> datetime.datetime:
    return datetime.datetime.combine(day, clock, tz)


def _next_clock(clock: datetime.time, local: datetime.datetime, *, past: bool) -> datetime.datetime:
    zone = local.tzinfo or datetime.UTC
    today = _at(local.date(), clock, zone)
    if past or today > local:
        # Both without their offset: of a time that comes twice in a night the second may be what is meant.
        gone = not past and today.timestamp() <= local.timestamp()
        return today.replace(fold=1) if gone else today
    return _at(local.date() + datetime.timedelta(days=1), clock, zone)


def _iso(match: re.Match[str], text: str, tz: datetime.tzinfo) -> datetime.datetime:
    year, month, day, clock_text, zone_text = match.groups()
    zone = tz
    if zone_text == "z":
        zone = datetime.UTC
    elif zone_text:
        digits = zone_text[1:].replace(":", "")
        offset = datetime.timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        if offset >= datetime.timedelta(days=1) or int(digits[2:]) >= 60:
            raise _refuse(text)
        zone = datetime.timezone(offset if zone_text[0] == "+" else -offset)
    clock = (_clock(clock_text, text) if clock_text else None) or datetime.time()
    return _at(_date(int(year), int(month), int(day), text), clock, zone)


def _short_date(word: str, text: str, local: datetime.datetime, *, past: bool) -> datetime.datetime:
    compact, parted = _MMDD.fullmatch(word), _MONTH_DAY.fullmatch(word)
    if compact is not None:
        month, day, year = compact.groups()
    elif parted is not None:
        month, _, day, year = parted.groups()
    else:
        raise _refuse(text)
    zone = local.tzinfo or datetime.UTC
    midnight = datetime.time()
    if year is not None:
        return _at(_date(2000 + int(year), int(month), int(day), text), midnight, zone)
    step = -1 if past else 1
    for candidate in range(local.year, local.year + 9 * step, step):  # leap days: 8 years at most
        found = _in_year(candidate, int(month), int(day))
        if found is not None and (found <= local.date() if past else found >= local.date()):
            return _at(found, midnight, zone)
    raise TimeError(f"invalid time {text!r}: there is no such day")


def _in_year(year: int, month: int, day: int) -> datetime.date | None:
    try:
        return datetime.date(year, month, day)
    except ValueError:
        return None


def _date(year: int, month: int, day: int, text: str) -> datetime.date:
    found = _in_year(year, month, day)
    if found is None:
        raise TimeError(f"invalid time {text!r}: there is no such day")
    return found
