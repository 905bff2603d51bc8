"""The queue: what is done to jobs that wait, arrays, bounds and estimates."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import estimates, lines, model, queueing
from batch_jobs.dependencies import Fate
from scheduler.contracts import clock
from scheduler.core import batch_order
from tests.unit.batch_jobs import world

BOB = dataclasses.replace(world.ALICE, user="bob")
ADMIN = dataclasses.replace(world.ALICE, team="ops", user="root", admin=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[world.TellingStore]:
    found = world.open_store(tmp_path)
    yield found
    found.close()


@pytest.fixture
def time() -> clock.FakeClock:
    return clock.FakeClock()


@pytest.fixture
def api(store: world.TellingStore, tmp_path: Path, time: clock.FakeClock) -> world.AppApi:
    options = dataclasses.replace(
        world.QUICK, qos={"high": 10.0, "low": 0.0}, team_queued_tokens=100_000
    )
    return world.AppApi(store, tmp_path, options=options, time=time)


def asked(api: world.AppApi, method: str, path: str, body: Any = None) -> tuple[int, str]:
    answer = api.client.request(method, f"/forebay/v1/jobs/{path}", json=body)
    said = answer.json()
    return answer.status_code, said["error"]["message"] if "error" in said else ""


def test_a_submission_may_wait_for_what_is_there_alone(api: world.AppApi) -> None:
    first = api.submit(world.many(1))
    api.submit(world.many(1), dependency=f"afterok:{first}?afterany:slurm:4711")
    for text, words in (("afterok:99", "no job 99"), ("afterok:1,afterok:1?afterok:1", "mixed")):
        answer = api.client.post(
            "/forebay/v1/jobs",
            params={"options": json.dumps({"dependency": text})},
            content=world.many(1),
        )
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_an_update_that_closes_a_circle_is_refused(
    api: world.AppApi, store: world.TellingStore
) -> None:
    one = api.submit(world.many(1))
    two = api.submit(world.many(1), dependency=f"afterok:{one}")
    code, words = asked(api, "PATCH", str(one), {"dependency": f"afterok:{two}"})
    assert (code, "1 → 2 → 1" in words) == (400, True)
    assert asked(api, "PATCH", str(two), {"dependency": "", "comment": "free"})[0] == 200
    assert store.must(two).dependency == ""


def test_a_circle_by_way_of_an_array_is_one_too(
    api: world.AppApi, store: world.TellingStore
) -> None:
    first = api.submit(world.many(1), array_task=0)
    api.submit(world.many(1), array_id=first, array_task=1)
    after = api.submit(world.many(1), dependency=f"afterok:{first}")
    code, words = asked(api, "PATCH", f"{first}_1", {"dependency": f"afterok:{after}"})
    assert (code, "2 → 3 → 2" in words) == (400, True), words
    assert "2 → 2" in asked(api, "PATCH", f"{first}_1", {"dependency": f"afterany:{first}"})[1]
    assert asked(api, "PATCH", f"{first}_1", {"dependency": f"afterok:{first}_0"})[0] == 200


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"priority": 5}, 403, "only an admin"),
        ({"priority": -5}, 200, ""),
        ({"qos": "none"}, 400, "not known here: high, low"),
        ({"qos": "high"}, 200, ""),
        ({"deadline_us": 5}, 400, "deadline has passed"),
        ({"begin_us": 10**30}, 400, "begin_us"),
        ({"unheard_of": 1}, 400, "unheard_of"),
        ({}, 400, "nothing to change"),
        ({"time_limit_s": 240, "name": "x"}, 200, ""),
    ],
)
def test_updates(api: world.AppApi, change: dict[str, Any], code: int, words: str) -> None:
    api.submit(world.many(1))
    got, said = asked(api, "PATCH", "1", change)
    assert got == code, said
    assert words in said


def test_an_admin_may_give_priority_and_what_an_admin_holds_an_admin_releases(
    api: world.AppApi, store: world.TellingStore
) -> None:
    api.submit(world.many(1))
    api.caller = ADMIN
    assert asked(api, "PATCH", "1", {"priority": 500})[0] == 200
    assert asked(api, "POST", "1/hold")[0] == 200
    api.caller = world.ALICE
    assert asked(api, "POST", "1/release")[0] == 403
    assert store.must(1).held == "admin"
    api.caller = ADMIN
    assert asked(api, "POST", "1/release")[0] == 200
    assert store.must(1).priority == 500


def test_a_users_own_hold_takes_the_place_of_no_admins(
    api: world.AppApi, store: world.TellingStore
) -> None:
    """Else what an admin holds its user would release: hold it once more, then let it go."""
    api.submit(world.many(1))
    api.caller = ADMIN
    asked(api, "POST", "1/hold")
    api.caller = world.ALICE
    code, words = asked(api, "POST", "1/hold")
    assert (code, "held by an admin" in words) == (403, True)
    assert asked(api, "POST", "1/release")[0] == 403
    assert store.must(1).held == "admin"
    assert not store.hold(1, "")
    assert store.must(1).held == "admin"


def test_requeue_is_for_what_runs_and_may_be_put_back(
    api: world.AppApi, store: world.TellingStore
) -> None:
    api.submit(world.many(1))
    api.submit(world.many(1), requeue=False)
    assert "only a running one" in asked(api, "POST", "1/requeue")[1]
    assert "--no-requeue" in asked(api, "POST", "2/requeue")[1]
    store.move(store.must(1), model.Event.START, started_us=1)
    assert asked(api, "POST", "1/requeue")[0] == 200
    assert store.must(1).requeue_us
    assert "not pending" in asked(api, "POST", "1/top")[1]
    assert asked(api, "POST", "2/top")[0] == 200
    assert store.must(2).top_us


def test_a_teams_queued_tokens_have_their_bound(api: world.AppApi) -> None:
    big = world.line("a", max_tokens=60_000)
    api.submit(big)
    answer = api.client.post("/forebay/v1/jobs", params={"options": "{}"}, content=big)
    assert answer.status_code == 429
    assert "100000 tokens queued" in answer.json()["error"]["message"]
    api.client.post("/forebay/v1/jobs/1/cancel")


def test_arrays_have_one_id_and_are_acted_on_together(
    api: world.AppApi, store: world.TellingStore
) -> None:
    first = api.submit(world.many(1), array_task=3, array_limit=1)
    api.submit(world.many(1), array_id=first, array_task=4, array_limit=1)
    shown = api.call("GET", "/forebay/v1/jobs").json["jobs"]
    assert [job["shown_id"] for job in shown] == ["1_3", "1_4"]
    assert api.call("GET", "/forebay/v1/jobs/1_4").json["job_id"] == 2
    assert asked(api, "GET", "1_5")[0] == 404
    assert asked(api, "POST", "1_4/hold")[0] == 200
    assert [store.must(n).held for n in (1, 2)] == ["", "user"]
    assert asked(api, "POST", "1/hold")[0] == 200
    assert [store.must(n).held for n in (1, 2)] == ["user", "user"]
    assert asked(api, "POST", "1/cancel")[0] == 200
    assert all(store.must(n).cancel_us for n in (1, 2))
    api.caller = BOB
    answer = api.client.post(
        "/forebay/v1/jobs",
        params={"options": json.dumps({"array_id": 1, "array_task": 9})},
        content=world.many(1),
    )
    assert answer.status_code == 404


def test_a_queue_knows_what_teams_had_and_who_waits_for_whom(
    store: world.TellingStore, time: clock.FakeClock
) -> None:
    now = time.wall_us()

    def add(**fields: Any) -> model.BatchJob:
        base = model.BatchJob(0, "physics", "alice", submitted_us=now)
        return store.add(dataclasses.replace(base, **fields), lambda job_id: None)

    done = add(counts=model.Counts(total=2))
    done = store.move(done, model.Event.START, started_us=now - 20_000_000)
    done = store.move(done, model.Event.DRAINED, used=model.Used(800, 300, 500))
    store.move(done, model.Event.PUBLISHED, ended_us=now - 10_000_000)
    after = add(dependency="afterok:1")
    theirs = add(team="chem", dependency="afterok:slurm:4711")
    both = add(dependency="afterok:2,singleton", name="fbatch")
    options = dataclasses.replace(world.QUICK, share_half_life_s=10.0)
    slurm = {4711: Fate.RUNNING}
    queue = queueing.Queue(store, options, {}, lambda ids: {n: slurm[n] for n in ids})
    jobs = store.active()
    decided = queue.decide(jobs, now)
    assert decided.start == (after.job_id,)
    assert decided.waits == {
        theirs.job_id: batch_order.Wait.DEPENDENCY,
        both.job_id: batch_order.Wait.DEPENDENCY,
    }
    assert queue.usage == {"physics": pytest.approx(500)}
    assert queue.tokens_per_s == pytest.approx(100)
    slurm[4711] = Fate.OK
    assert theirs.job_id in queue.decide(jobs, now + 6_000_000).start


def test_who_waits_for_an_array_hears_of_each_of_its_tasks(
    store: world.TellingStore, time: clock.FakeClock
) -> None:
    """Tasks that ended after the first one was asked for were forgotten: a failed one was none."""
    now = time.wall_us()

    def add(**fields: Any) -> model.BatchJob:
        base = model.BatchJob(0, "physics", "alice", submitted_us=now)
        return store.add(dataclasses.replace(base, **fields), lambda job_id: None)

    def end(task: model.BatchJob, failed: int) -> None:
        counts = model.Counts(total=1, ok=1 - failed, failed=failed)
        run = store.move(task, model.Event.START, started_us=now)
        done = store.move(run, model.Event.DRAINED, counts=counts)
        store.move(done, model.Event.PUBLISHED, ended_us=now)

    first = add(array_task=0)
    tasks = [first, *(add(array_task=task, array_id=first.job_id) for task in (1, 2))]
    wishes = ("afterok:1", "afternotok:1", "afterany:1", "afterok:1_0")
    good, bad, any_, one = (add(dependency=text, name=text).job_id for text in wishes)
    queue = queueing.Queue(store, world.QUICK, {})
    waits = []
    for task, failed in zip(tasks, (0, 1, 0), strict=True):
        waits.append(queue.decide(store.active(), now).waits)
        end(task, failed)
    decided = queue.decide(store.active(), now)
    assert [sorted(each) for each in waits] == [
        [good, bad, any_, one], [good, bad, any_], [good, bad, any_]
    ]  # fmt: skip
    assert decided.waits == {good: batch_order.Wait.NEVER}
    assert set(decided.start) == {bad, any_, one}


def test_a_job_that_slurm_has_forgotten_since_has_ended_all_the_same(
    store: world.TellingStore, time: clock.FakeClock
) -> None:
    """Slurm forgets a job minutes after its end; the other one that is waited for may run for hours."""
    now = time.wall_us()
    text = "afterok:slurm:1:slurm:2"
    job = model.BatchJob(0, "physics", "alice", submitted_us=now, dependency=text)
    job_id = store.add(job, lambda job_id: None).job_id
    slurm = {1: Fate.OK, 2: Fate.RUNNING}
    asked_for: list[list[int]] = []

    def fates(ids: Iterable[int]) -> dict[int, Fate]:
        asked_for.append(list(ids))
        return {n: slurm.get(n, Fate.UNKNOWN) for n in asked_for[-1]}

    queue = queueing.Queue(store, world.QUICK, {}, fates)
    assert not queue.decide(store.active(), now).start
    slurm = {2: Fate.OK}
    assert queue.decide(store.active(), now + 6_000_000).start == (job_id,)
    assert asked_for == [[1, 2], [2]]


def test_a_job_whose_results_are_being_written_holds_no_place(
    store: world.TellingStore, time: clock.FakeClock
) -> None:
    """A user's file system that hangs held up every other job, once it had as many as may run."""
    now = time.wall_us()
    first, second = (
        store.add(model.BatchJob(0, "physics", "alice", submitted_us=now), lambda job_id: None)
        for _ in range(2)
    )
    queue = queueing.Queue(store, dataclasses.replace(world.QUICK, max_jobs=1), {})
    run = store.move(first, model.Event.START, started_us=now)
    assert queue.decide(store.active(), now).waits == {second.job_id: batch_order.Wait.PRIORITY}
    store.move(run, model.Event.DRAINED)
    assert queue.decide(store.active(), now).start == (second.job_id,)


def test_tokens_are_estimated_from_what_lines_say() -> None:
    found = estimates.Tokens()
    for body in ({"max_tokens": 7}, {"max_completion_tokens": 5, "n": 3}, {}):
        raw = lines.RawLine(1, world.line("a", **body))
        line = lines.parse(raw, lines.Rules())
        assert isinstance(line, lines.Line)
        found.add(line, 400)
    assert (found.prompt, found.output) == (300, 7 + 15 + estimates.DEFAULT_OUTPUT)
    assert found.models == {"chat": [300, found.output]}
