"""fctl schedule and /admin/schedules: what is kept, refused and shown."""

import datetime
import io
import json
import shlex

import pytest

from scheduler.contracts import requests
from scheduler.runtime import commands, schedules
from tests.unit.runtime import adminsite

site = adminsite.site  # the fixture
ADD = 'add day --model chat --floor 8 --cron "0 8 * * mon-fri" --until 18:00 --zone Europe/Berlin'


def fctl(site: adminsite.Site, line: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.fctl(
        ["schedule", *shlex.split(line)], api=adminsite.SiteApi(site), out=out, err=err
    )
    return code, out.getvalue() + err.getvalue()


def test_its_life(site: adminsite.Site) -> None:
    assert fctl(site, ADD)[0] == 0
    code, told = fctl(site, "list")
    assert code == 0
    assert told.splitlines()[1].split()[:8] == ["day", "chat", "8", "0", "8", "*", "*", "mon-fri"]
    assert fctl(site, "pause day")[1] == "schedule day: paused\n"
    assert "paused" in fctl(site, "list")[1]
    assert fctl(site, "resume day")[0] == 0
    coming = json.loads(fctl(site, "next day -n 3 --json")[1])["next"]
    assert len(coming) == 3
    assert all("T08:00:00+01:00" in each or "T08:00:00+02:00" in each for each in coming)
    assert fctl(site, "rm day")[0] == 0
    assert json.loads(fctl(site, "list --json")[1]) == {"schedules": []}


def test_what_began_is_told_and_what_was_warm(site: adminsite.Site) -> None:
    assert fctl(site, ADD)[0] == 0
    assert fctl(site, "list")[1].splitlines()[1].split()[-2:] == ["-", "-"]
    assert fctl(site, "history day")[1].split() == ["BEGAN", "ENDS", "NOTED", "WARM"]
    epoch = site.registry.lead.take("b", 1, 60_000_000)
    assert epoch is not None
    first = round(datetime.datetime(2040, 1, 2, 7, tzinfo=datetime.UTC).timestamp()) * 1_000_000
    hour, day = 3600 * 1_000_000, 86_400 * 1_000_000
    for number, (late, serving) in enumerate(((0, 8), (hour, 7), (11 * hour, 0))):
        begins = first + number * day
        ends, noted = begins + 10 * hour, begins + late
        made = schedules.Firing("day", "chat", 8, begins, ends, noted, serving)
        assert site.registry.timetable.note(epoch, [made]) == (made,)
    lines = fctl(site, "history day")[1].splitlines()[1:]
    assert [line.split()[2:] for line in lines] == [
        ["missed", "-"], ["late", "7/8"], ["on", "time", "8/8"],
    ]  # fmt: skip
    assert len(fctl(site, "history day -n 1")[1].splitlines()) == 2
    assert fctl(site, "list")[1].splitlines()[1].endswith("2040-01-04T07:00:00+00:00  - (missed)")
    (told,) = json.loads(fctl(site, "history day -n 1 --json")[1])["began"]
    assert told["begins"] == "2040-01-04T07:00:00+00:00"
    assert (told["timing"], told["floor"], told["serving"]) == ("missed", 8, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (ADD.replace("chat", "cat"), "cat: not deployed here"),
        (ADD.replace("mon-fri", "mon-fry"), "Invalid weekday name"),
        (ADD.replace("--floor 8", "--floor 0"), "floor"),
        (ADD.replace("18:00", "6pm"), "write HH:MM"),
        (ADD.replace("Europe/Berlin", "Berlin"), "is unknown; write one as Europe/Berlin"),
        ("pause nothing", "schedule nothing: unknown"),
        ("rm nothing", "schedule nothing: unknown"),
        ("next nothing", "schedule nothing: unknown"),
        ("history nothing", "schedule nothing: unknown"),
    ],
)
def test_what_is_refused(site: adminsite.Site, line: str, said: str) -> None:
    code, told = fctl(site, line)
    assert code != 0
    assert said in told
    assert told.count("\n") == 1


def test_a_name_is_taken_once_and_only_admins_change(site: adminsite.Site) -> None:
    assert fctl(site, ADD)[0] == 0
    assert "there is one" in fctl(site, ADD)[1]
    site.caller = requests.Caller("physics", "ada", "k2")
    assert "no admin" in fctl(site, "rm day")[1]
    assert fctl(site, "list")[0] == 0
