"""Days that have 23, 25 or half-hour borders: every row is in one day and one hour, none in two."""

import datetime
import io
import json
import zoneinfo

import pytest

from accounting import facct, freport, spool, windows
from scheduler.contracts import clock
from tests.unit.accounting import commanding, samples, world

HOUR_US = 3_600_000_000
DAYS = [
    ("Europe/Berlin", "2026-03-29", 23),
    ("Europe/Berlin", "2026-10-25", 25),
    ("America/St_Johns", "2026-03-08", 23),
    ("America/St_Johns", "2026-11-01", 25),
    ("America/St_Johns", "2026-06-01", 24),
    ("Asia/Kathmandu", "2026-06-01", 24),
]


def midnight(zone: str, date: str) -> int:
    at = datetime.datetime.fromisoformat(f"{date}T00:00:00").replace(tzinfo=zoneinfo.ZoneInfo(zone))
    return windows.to_us(at)


@pytest.fixture(scope="module", params=DAYS, ids=lambda day: f"{day[0]}-{day[1]}")
def day(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, int, commanding.Gateway]:
    """A row in every quarter of an hour, from a day before to a day after."""
    zone, date, hours = request.param
    state = tmp_path_factory.mktemp("state")
    sink = spool.Spool(state / "spool" / "g", "g", clock=clock.FakeClock())
    first = midnight(zone, date)
    for number in range(-4 * 24, 4 * 50):
        at = first + number * HOUR_US // 4
        sink.append(samples.row("close", f"q{number}", started_us=at, output_tokens=1))
    sink.close()
    return zone, date, hours, commanding.Gateway(state, world.ADMIN)


def run(day: tuple[str, str, int, commanding.Gateway], line: str) -> str:
    zone, date, _, api = day
    out, err = io.StringIO(), io.StringIO()
    prog, *argv = line.split()
    main = {"facct": facct.facct, "freport": freport.freport}[prog]
    tz = zoneinfo.ZoneInfo(zone)
    now = datetime.datetime.fromisoformat(f"{date}T18:00:00").replace(tzinfo=tz)
    code = main(argv, api=api, out=out, err=err, env={}, now=now.astimezone(datetime.UTC), tz=tz)
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def test_a_local_day_has_its_own_rows_and_no_others(
    day: tuple[str, str, int, commanding.Gateway],
) -> None:
    _, date, hours, _ = day
    tomorrow = datetime.date.fromisoformat(date) + datetime.timedelta(days=1)
    rows = run(day, f"facct -P -n -X -o submit -S {date} -E {tomorrow}").splitlines()
    assert len(rows) == 4 * hours
    assert {row[:10] for row in rows} == {date}
    (report,) = json.loads(run(day, f"freport cluster -S {date} -E {tomorrow} --json"))["rows"]
    assert (report["output_tokens"], report["end_us"] - report["start_us"]) == (
        4 * hours,
        hours * HOUR_US,
    )


def test_hours_are_sixty_minutes_and_add_up_to_the_day(
    day: tuple[str, str, int, commanding.Gateway],
) -> None:
    _, date, hours, _ = day
    tomorrow = datetime.date.fromisoformat(date) + datetime.timedelta(days=1)
    rows = json.loads(run(day, f"freport cluster by hour -S {date} -E {tomorrow} --json"))["rows"]
    assert [row["output_tokens"] for row in rows] == [4] * hours
    assert {row["end_us"] - row["start_us"] for row in rows} == {HOUR_US}


def test_days_do_not_share_a_row(day: tuple[str, str, int, commanding.Gateway]) -> None:
    _, date, hours, _ = day
    at = datetime.date.fromisoformat(date)
    one = datetime.timedelta(days=1)
    line = f"freport cluster by day -S {at - one} -E {at + 2 * one} -P -n -T tokens -o start,output"
    found = dict(row.split("|") for row in run(day, line).splitlines())
    assert found[f"{date}T00:00:00"] == str(4 * hours)
    assert found[f"{at + one}T00:00:00"] == "96"
    assert list(found) == sorted(found)


def test_today_is_from_midnight_on_and_yesterday_the_day_before(
    day: tuple[str, str, int, commanding.Gateway],
) -> None:
    zone, date, _, _ = day
    today = run(day, "facct -P -n -X -o submit").splitlines()
    assert today[0] == f"{date}T00:00:00"
    assert today[-1] == f"{date}T18:00:00"
    yesterday = json.loads(run(day, "freport cluster --json"))["window"]
    assert (yesterday["end_us"], yesterday["zone"]) == (midnight(zone, date), zone)
