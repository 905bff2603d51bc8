"""fctl schedule and /admin/schedules: what is kept, refused and shown."""

import io
import json
import shlex

import pytest

from scheduler.contracts import requests
from scheduler.runtime import commands
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
