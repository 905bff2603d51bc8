"""The HTTP surface: who may see and do what, and what a submission is refused for."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import intake, model, results, routes
from scheduler.contracts import clock, requests
from tests.unit.batch_jobs import world

BOB = dataclasses.replace(world.ALICE, user="bob")
CAROL = dataclasses.replace(world.ALICE, team="chemistry", user="carol")
COORDINATOR = dataclasses.replace(world.ALICE, user="coco", coordinator=True)
ADMIN = dataclasses.replace(world.ALICE, team="ops", user="root", admin=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[world.TellingStore]:
    found = world.open_store(tmp_path)
    yield found
    found.close()


@pytest.fixture
def api(store: world.TellingStore, tmp_path: Path) -> world.AppApi:
    return world.AppApi(store, tmp_path, time=clock.FakeClock())


def refused(api: world.AppApi, data: bytes, status: int, **wish: Any) -> str:
    answer = api.client.post(routes.PREFIX, params={"options": json.dumps(wish)}, content=data)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_a_submission_is_kept_whole_and_shown(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    data = world.many(3) + b"\n" + b"{}\n"
    answer = api.client.post(
        routes.PREFIX, params={"options": json.dumps({"name": "n", "comment": "c"})}, content=data
    ).json()
    assert (answer["job_id"], answer["lines"], answer["bad_lines"]) == (1, 4, 1)
    assert answer["errors"][0]["number"] == 5
    assert (intake.job_folder(tmp_path, 1) / results.INPUT).read_bytes() == data
    job = store.must(1)
    assert (job.team, job.user, job.name, job.comment) == ("physics", "alice", "n", "c")
    assert (job.last_line, job.counts.total, job.state) == (5, 4, model.State.PENDING)
    assert len(job.input_sha256) == 64
    assert job.submitted_us == 1_700_000_000_000_000
    shown = api.client.get(f"{routes.PREFIX}/1").json()
    assert (shown["state"], shown["lines"]["total"]) == ("PENDING", 4)


def test_test_only_keeps_nothing(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    answer = api.client.post(
        routes.PREFIX, params={"options": '{"test_only": true}'}, content=world.many(2) + b"x\n"
    ).json()
    assert (answer["job_id"], answer["lines"], answer["bad_lines"]) == (None, 3, 1)
    assert store.list() == []
    assert list((tmp_path / intake.FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    ("data", "wish", "status", "words"),
    [
        (b"", {}, 400, "no request"),
        (b"\n\n", {}, 400, "no request"),
        (b"x\n", {"strict_lines": True}, 400, "line 1: not JSON"),
        (world.many(1), {"endpoint": "/v1/images"}, 400, "endpoint"),
        (world.many(1), {"order": "random"}, 400, "order"),
        (world.many(1), {"deadline_us": 5}, 400, "deadline"),
        (world.many(1), {"begin_us": 9 * 10**15, "deadline_us": 8 * 10**15}, 400, "deadline"),
        (world.many(1), {"begin_us": 10**30}, 400, "begin_us"),
        (world.many(1), {"deadline_us": 10**18}, 400, "deadline_us"),
        (world.many(1), {"time_limit_s": 2**62}, 400, "time_limit_s"),
        (world.many(1), {"account": "chemistry"}, 403, "only 'physics'"),
        (world.many(1), {"output": "%a"}, 400, "without --array"),
        (world.many(1), {"output": "/x/o", "array_task": 0}, 400, "one file for all tasks"),
        (world.many(1), {"error": "/x/%A", "array_task": 0}, 400, "one file for all tasks"),
        (world.many(1), {"output": "out", "error": "out", "cwd": "/tmp"}, 400, "two files"),
        (world.many(1), {"output": "relative"}, 400, "no path of a file"),
        (world.many(1), {"unheard_of": 1}, 400, "unheard_of"),
        (world.many(1), {"time_limit_s": "many"}, 400, "time_limit_s"),
        (world.many(1), {"umask": 4096}, 400, "umask"),
        (world.many(1), {"name": "a\0b"}, 400, "NUL"),
        (world.many(1), {"output": "out", "cwd": "/tmp"}, 400, "Unix user"),
    ],
)
def test_what_is_refused(
    api: world.AppApi,
    store: world.TellingStore,
    tmp_path: Path,
    data: bytes,
    wish: dict[str, Any],
    status: int,
    words: str,
) -> None:
    assert words in refused(api, data, status, **wish)
    assert store.list() == []
    assert not list((tmp_path / intake.FOLDER).glob("*"))


def test_a_caller_without_tier_batch_is_refused(api: world.AppApi) -> None:
    api.caller = dataclasses.replace(world.ALICE, tiers=(requests.Tier.INTERACTIVE,))
    assert "tier batch" in refused(api, world.many(1), 403)


def test_a_model_that_the_caller_may_not_use_fails_line_by_line(api: world.AppApi) -> None:
    api.caller = dataclasses.replace(world.ALICE, models=("small",))
    data = world.line("a", model="small") + world.line("b", model="big")
    answer = api.client.post(routes.PREFIX, content=data).json()
    assert [bad["custom_id"] for bad in answer["errors"]] == ["b"]


def ids(api: world.AppApi, **filters: str) -> list[int]:
    return [job["job_id"] for job in api.client.get(routes.PREFIX, params=filters).json()["jobs"]]


def test_who_sees_what(api: world.AppApi) -> None:
    for caller in (world.ALICE, BOB, CAROL):
        api.caller = caller
        api.submit(world.many(1))
    seen = {}
    for caller in (world.ALICE, BOB, CAROL, COORDINATOR, ADMIN):
        api.caller = caller
        seen[caller.user] = ids(api)
        for job_id in (1, 2, 3):
            status = api.client.get(f"{routes.PREFIX}/{job_id}").status_code
            assert status == (200 if job_id in seen[caller.user] else 404)
            answer = api.client.post(f"{routes.PREFIX}/{job_id}/cancel")
            assert answer.status_code == status
    assert seen == {"alice": [1], "bob": [2], "carol": [3], "coco": [1, 2], "root": [1, 2, 3]}


def test_filters_never_widen_what_is_seen(api: world.AppApi) -> None:
    api.submit(world.many(1), name="x")
    api.caller = BOB
    api.submit(world.many(1), name="y")
    assert ids(api, user="alice") == []
    assert ids(api, account="chemistry") == []
    assert ids(api, me="1") == [2]
    api.caller = ADMIN
    assert ids(api, user="alice,bob", name="y") == [2]
    assert ids(api, state="PENDING") == [1, 2]
    assert ids(api, state="FAILED") == []
    assert ids(api, ids="1,99") == [1]
    assert api.client.get(routes.PREFIX, params={"state": "SLEEPY"}).status_code == 400
    for none in ("x", "9" * 30, "-1"):
        assert api.client.get(routes.PREFIX, params={"ids": none}).status_code == 400


@pytest.mark.parametrize(
    ("job_id", "status"), [("x", 400), ("9", 404), ("9" * 30, 400), ("1_3", 404), ("²", 400)]
)
def test_ids_that_name_no_job(api: world.AppApi, job_id: str, status: int) -> None:
    api.submit(world.many(1))
    answer = api.client.post(f"{routes.PREFIX}/{job_id}/cancel")
    assert answer.status_code == status
    assert "message" in answer.json()["error"]


def test_what_an_admin_holds_an_admin_releases(
    api: world.AppApi, store: world.TellingStore
) -> None:
    api.submit(world.many(1))
    api.caller = ADMIN
    assert api.client.post(f"{routes.PREFIX}/1/hold").status_code == 200
    assert store.must(1).held == "admin"
    api.caller = world.ALICE
    assert api.client.post(f"{routes.PREFIX}/1/release").status_code == 403
    api.caller = ADMIN
    assert api.client.post(f"{routes.PREFIX}/1/release").status_code == 200
    assert store.must(1).held == ""


def test_an_ended_job_says_so_and_gives_its_results(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    api.submit(world.many(1))
    assert api.client.get(f"{routes.PREFIX}/1/output").status_code == 400
    (intake.job_folder(tmp_path, 1) / results.OUTPUT).write_bytes(b"{}\n")
    store.move(store.must(1), model.Event.FAIL)
    assert api.client.post(f"{routes.PREFIX}/1/cancel").json() == {"job_id": 1, "ended": True}
    assert api.client.get(f"{routes.PREFIX}/1/output").content == b"{}\n"
    assert api.client.get(f"{routes.PREFIX}/1/errors").status_code == 404


def test_an_upload_is_checked_while_it_streams(api: world.AppApi) -> None:
    def chunks() -> Iterator[bytes]:
        data = world.many(500)
        for at in range(0, len(data), 333):
            yield data[at : at + 333]

    answer = api.client.post(routes.PREFIX, content=chunks())
    assert answer.json()["lines"] == 500


def test_a_folder_left_by_an_undone_insert_is_in_nobodys_way(
    api: world.AppApi, tmp_path: Path
) -> None:
    stray = intake.job_folder(tmp_path, 1)
    stray.mkdir(parents=True)
    (stray / "old").write_bytes(b"x")
    assert api.submit(world.many(1)) == 1
    assert not (stray / "old").exists()
