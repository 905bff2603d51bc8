"""Schedules as floors: what a cron line and an end say about any moment. No firing changes anything.

A schedule is a state and not an event: whoever leads works out from the clock which floors are in force, so
that a firing can't be missed, done twice by two brokers, or forgotten over a restart (`firings` notes when
each began). Cron lines are read by
APScheduler; days of the week count as in cron (0 and 7 are Sunday), which APScheduler itself does not do.
"""

import dataclasses
import datetime
import enum
import re
import typing
import zoneinfo
from collections.abc import Iterator

from scheduler.core import floors

if typing.TYPE_CHECKING:
    from apscheduler.triggers import cron

AHEAD = datetime.timedelta(hours=26)  # further ahead than any replica's start takes
BACK = datetime.timedelta(days=7)  # further back nobody asks whether it was warm
MOST_DUE = 100  # beginnings of one that are made up for: one each minute while no broker led
LATE_US = 60_000_000  # a change of leader and a busy minute are no delay worth a word
_DAY = datetime.timedelta(days=1)
_ANY_DAY = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
_NAMES = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """A floor that comes again and again.

    Attributes:
        name: unique.
        model: the served name.
        floor: replicas kept warm while it is in force.
        cron: five fields, when it begins.
        until: ``HH:MM``, when it ends: the first such time after it began, within a day.
        zone: the time zone of both.
        paused: it says nothing while this is true.
        since_us: UTC µs; what began before has been noted, or was none of its (`scheduler.runtime.firings`).
    """

    name: str
    model: str
    floor: int
    cron: str
    until: str
    zone: str = "UTC"
    paused: bool = False
    since_us: int = 0

    def check(self) -> None:
        """Raise `ValueError`, one line, if it can't be used."""
        if self.floor < 1:
            raise ValueError(f"schedule {self.name}: floor {self.floor}: must be 1 or more")
        _until(self)
        # 30 February: looked for over thousands of years, at each look at the schedules.
        if _trigger(self).get_next_fire_time(None, _ANY_DAY) is None:
            raise ValueError(f"schedule {self.name}: cron {self.cron!r}: never comes")

    def spans(
        self, now: datetime.datetime, ahead: datetime.timedelta = AHEAD
    ) -> Iterator[tuple[datetime.datetime, datetime.datetime]]:
        """Yield begin and end of what is in force at ``now`` and of what begins within ``ahead``."""
        trigger, ends = _trigger(self), _until(self)
        zone = zoneinfo.ZoneInfo(self.zone)
        begin = trigger.get_next_fire_time(None, (now - _DAY).astimezone(zone))
        while begin is not None and begin <= now + ahead:
            end = _end(begin, ends, zone)
            if end > now:
                yield begin, end
            # Whatever begins before that end would end then too.
            begin = trigger.get_next_fire_time(None, end)

    def next(self, now: datetime.datetime, count: int) -> list[datetime.datetime]:
        """Return the next times at which it begins."""
        trigger, found = _trigger(self), list[datetime.datetime]()
        zone, after = zoneinfo.ZoneInfo(self.zone), now
        while len(found) < count:
            begin = trigger.get_next_fire_time(None, after.astimezone(zone))
            if begin is None:
                break
            found.append(begin)
            # In UTC: on the wall clock a minute later may be an hour earlier.
            after = max(begin.astimezone(datetime.UTC), after) + datetime.timedelta(minutes=1)
        return found


def in_force(
    schedules: "list[Schedule] | tuple[Schedule, ...]", now_us: int
) -> tuple[floors.Floor, ...]:
    """Return the floors that are in force at UTC µs ``now_us``, and those that come."""
    now = utc(now_us)
    return tuple(
        floors.Floor(
            name=schedule.name,
            model=schedule.model,
            replicas=schedule.floor,
            starts_s=(begin - now).total_seconds(),
            ends_s=(end - now).total_seconds(),
        )
        for schedule in schedules
        if not schedule.paused
        for begin, end in schedule.spans(now)
    )


class Timing(enum.StrEnum):
    """When a beginning was noticed: at once, while it was in force, or only after its end."""

    ON_TIME = "on time"
    LATE = "late"
    MISSED = "missed"


@dataclasses.dataclass(frozen=True, slots=True)
class Firing:
    """One beginning of a schedule.

    Attributes:
        schedule, model, floor: the schedule's name, and what it asked for then.
        begins_us, ends_us: UTC µs.
        noted_us: when a leader noticed it.
        serving: replicas of the model that served at that moment.
    """

    schedule: str
    model: str
    floor: int
    begins_us: int
    ends_us: int
    noted_us: int
    serving: int

    @property
    def timing(self) -> Timing:
        """Return when it was noticed."""
        if self.noted_us >= self.ends_us:
            return Timing.MISSED
        return Timing.ON_TIME if self.noted_us - self.begins_us <= LATE_US else Timing.LATE

    @property
    def warm(self) -> str:
        """Return how much of the floor was warm, as people read it."""
        return "-" if self.timing is Timing.MISSED else f"{self.serving}/{self.floor}"


def due(schedule: Schedule, now_us: int) -> list[tuple[int, int]]:
    """Return begin and end (UTC µs) of what began since one was last looked at, the newest `MOST_DUE`.

    Raises:
        ValueError: this host can't read the schedule.
    """
    if schedule.paused:
        return []
    now = utc(now_us)
    since = max(utc(schedule.since_us), now - BACK)
    began = [span for span in schedule.spans(since, now - since) if span[0] >= since]
    return [(_us(begin), _us(end)) for begin, end in began[-MOST_DUE:]]


def utc(us: int) -> datetime.datetime:
    """Return the time at UTC µs ``us``."""
    return datetime.datetime.fromtimestamp(us / 1_000_000, datetime.UTC)


def _us(at: datetime.datetime) -> int:
    return round(at.timestamp() * 1_000_000)


def _trigger(schedule: Schedule) -> "cron.CronTrigger":
    # Half a second to load: for who reads a cron line, not for every process with a registry.
    from apscheduler.triggers import cron

    fields = schedule.cron.split()
    if len(fields) != 5:
        raise ValueError(
            f"schedule {schedule.name}: cron {schedule.cron!r}: write five fields: minute hour day month "
            "weekday"
        )
    minute, hour, day, month, weekday = fields
    if day != "*" and weekday != "*":
        # cron takes either, APScheduler both: whichever we chose, half of the readers would be wrong.
        raise ValueError(
            f"schedule {schedule.name}: cron {schedule.cron!r}: give a day of the month or of the week, "
            "not both"
        )
    try:
        zone = zoneinfo.ZoneInfo(schedule.zone)
    except (zoneinfo.ZoneInfoNotFoundError, OSError, ValueError) as error:
        raise ValueError(
            f"schedule {schedule.name}: time zone {schedule.zone!r} is unknown; write one as Europe/Berlin"
        ) from error
    try:
        return cron.CronTrigger(
            minute=minute,
            hour=hour,
            day=day,
            month=month.lower(),
            day_of_week=_weekday(weekday.lower()),
            timezone=zone,
        )
    except ValueError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"schedule {schedule.name}: cron {schedule.cron!r}: {words}") from error


def _weekday(field: str) -> str:
    """Return cron's days of the week by name; steps stay as they are."""
    parts = []
    for part in field.split(","):
        days, slash, step = part.partition("/")
        named = re.sub(r"[0-9]+", lambda found: _name(int(found[0])), days)
        first, dash, last = named.partition("-")
        if dash and first == "sun":  # the week of APScheduler begins with Monday
            parts += ["sun"] if last == "sun" else ["sun", f"mon-{last}{slash}{step}"]
        else:
            parts.append(f"{named}{slash}{step}")
    return ",".join(parts)


def _name(number: int) -> str:
    if number >= len(_NAMES):
        raise ValueError(f"day of the week {number}: 0 (Sunday) to 7 (Sunday)")
    return _NAMES[number]


def _until(schedule: Schedule) -> datetime.time:
    found = _CLOCK.fullmatch(schedule.until)
    if found is None:
        raise ValueError(f"schedule {schedule.name}: until {schedule.until!r}: write HH:MM")
    return datetime.time(int(found[1]), int(found[2]))


def _end(
    begin: datetime.datetime, ends: datetime.time, zone: zoneinfo.ZoneInfo
) -> datetime.datetime:
    """Return the first ``ends`` on the wall clock after ``begin``, whatever the clock does that day."""
    local = begin.astimezone(zone)
    end = datetime.datetime.combine(local.date(), ends, zone)
    if end.astimezone(datetime.UTC) <= begin.astimezone(datetime.UTC):
        end = datetime.datetime.combine(local.date() + _DAY, ends, zone)
    return end
