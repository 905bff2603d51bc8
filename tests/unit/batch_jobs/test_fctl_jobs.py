"""fctl on batch jobs: hold, release, requeue, top, update, by scontrol's words."""

import datetime
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_jobs import model
from scheduler.runtime import commands
from tests.unit.batch_jobs import world


@pytest.fixture
def store(tmp_path: Path) -> Iterator[world.TellingStore]:
    found = world.open_store(tmp_path)
    yield found
    found.close()


@pytest.fixture
def api(store: world.TellingStore, tmp_path: Path) -> world.AppApi:
    made = world.AppApi(store, tmp_path)
    for _ in range(3):
        made.submit(world.many(1))
    return made


def fctl(api: world.AppApi, *argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.fctl(argv, api=api, out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def test_hold_release_and_top(api: world.AppApi, store: world.TellingStore) -> None:
    assert fctl(api, "hold", "1,3") == (0, "job 1: held\njob 3: held\n", "")
    assert [store.must(n).held for n in (1, 2, 3)] == ["user", "", "user"]
    assert fctl(api, "release", "3")[0] == 0
    assert not store.must(3).held
    assert fctl(api, "top", "3") == (0, "job 3: on top\n", "")
    assert store.must(3).top_us


def test_one_that_can_not_be_stops_none_of_the_others(
    api: world.AppApi, store: world.TellingStore
) -> None:
    code, out, err = fctl(api, "hold", "1,9,2")
    assert (code, out) == (1, "job 1: held\njob 2: held\n")
    assert err == "fctl: error: there is no job 9, or it is not yours\n"
    assert "only a running one" in fctl(api, "requeue", "1")[2]
    store.move(store.must(3), model.Event.START, started_us=1)
    assert fctl(api, "requeue", "3") == (0, "job 3: put back\n", "")
    assert "invalid job id" in fctl(api, "top", "x")[2]


@pytest.mark.parametrize(
    ("text", "seconds"), [("4:00", 240), ("2-12", 216_000), ("3-0:00", 259_200), ("30:15", 1_860)]
)
def test_b7_durations_are_read_as_fbatch_reads_them(
    api: world.AppApi, store: world.TellingStore, text: str, seconds: int
) -> None:
    """B7: MM:SS is minutes, D-HH days and hours; what is neither is refused."""
    assert fctl(api, "update", "job=2", f"TimeLimit={text}") == (0, "job 2: updated\n", "")
    assert store.must(2).time_limit_s == seconds


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (("time=2-",), "time"),
        (("begin=9pm",), "begin"),
        (("priority=x",), "no whole number"),
        (("unheard=1",), "unknown key unheard"),
        (("priority=5",), "only an admin"),
        (("dependency=afterok:2",), "2 → 2"),
    ],
)
def test_updates_that_are_refused(api: world.AppApi, pairs: tuple[str, ...], words: str) -> None:
    code, out, err = fctl(api, "update", "job=2", *pairs)
    assert (code, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1


def test_updates(api: world.AppApi, store: world.TellingStore) -> None:
    said = fctl(api, "update", "job=2,3", "JobName=n", "dependency=afterany:1", "Priority=-4")
    assert said == (0, "job 2: updated\njob 3: updated\n", "")
    job = store.must(3)
    assert (job.name, job.dependency, job.priority) == ("n", "afterany:1", -4)


def test_json_is_json_for_each_of_them(api: world.AppApi, store: world.TellingStore) -> None:
    code, out, err = fctl(api, "hold", "--json", "1,9")
    assert code == 1
    assert "no job 9" in err
    assert json.loads(out) == {
        "jobs": ["1"],
        "done": "held",
        "errors": ["there is no job 9, or it is not yours"],
    }
    for argv, done in (
        (("release", "--json", "1"), "released"),
        (("top", "--json", "2"), "on top"),
        (("update", "--json", "JobId=2", "TimeLimit=4:00"), "updated"),
    ):
        code, out, _ = fctl(api, *argv)
        assert (code, json.loads(out)["done"]) == (0, done)
    assert store.must(2).time_limit_s == 240
    store.move(store.must(3), model.Event.START, started_us=1)
    assert json.loads(fctl(api, "requeue", "3", "--json")[1])["jobs"] == ["3"]


def test_one_that_can_not_be_changed_stops_no_update_of_the_others(
    api: world.AppApi, store: world.TellingStore
) -> None:
    code, out, err = fctl(api, "update", "job=1,9,3", "comment=x")
    assert (code, out) == (1, "job 1: updated\njob 3: updated\n")
    assert "no job 9" in err
    assert [store.must(n).comment for n in (1, 2, 3)] == ["x", "", "x"]


def test_a_begin_in_another_season_is_that_seasons_hour(
    api: world.AppApi, store: world.TellingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read by the offset of the day on which it was given."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    for text, hour in (("2097-07-01T08:00", 6), ("2097-01-15T08:00", 7)):
        assert fctl(api, "update", "job=2", f"begin={text}")[0] == 0
        at = datetime.datetime.fromtimestamp(store.must(2).begin_us / 1e6, datetime.UTC)
        assert at.hour == hour
