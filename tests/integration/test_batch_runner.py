"""The batch runner against a scripted gateway: what each kind of answer does to a line and a job."""

import asyncio
import dataclasses
import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import intake, model, results
from scheduler.contracts import errors
from tests.integration import batch_stage
from tests.unit.batch_jobs import world

stage = batch_stage.stage  # the fixture


async def test_every_line_is_answered_once_with_its_own_answer(stage: batch_stage.Stage) -> None:
    job = await stage.run(world.many(200))
    assert job.state is model.State.COMPLETED
    assert job.counts == model.Counts(total=200, ok=200)
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in stage.output(1)
    }
    assert answers == {f"c{n}": f"c{n}" for n in range(1, 201)}
    assert len(stage.output(1)) == 200
    assert stage.errors(1) == []
    assert set(stage.gateway.calls.values()) == {1}
    headers = stage.gateway.headers[0]
    assert headers["X-Forebay-Team"] == "physics"
    assert headers["X-Forebay-User"] == "alice"
    assert headers["X-Forebay-Batch-Job"] == "1"
    assert headers["X-Forebay-Priority"] == "batch"
    assert headers["Authorization"] == "Bearer service"


async def test_results_come_in_input_order_if_asked(stage: batch_stage.Stage) -> None:
    async def late(custom_id: str) -> None:
        if custom_id == "c1":
            await released.wait()
        if custom_id == "c9":
            released.set()

    released = asyncio.Event()
    stage.gateway.before = late
    await stage.run(world.many(9) + b"{}\n" + world.line("c11"), order="input")
    assert [line["custom_id"] for line in stage.output(1)] == [f"c{n}" for n in [*range(1, 10), 11]]


async def test_b2_three_bad_lines_cost_no_other_line(stage: batch_stage.Stage) -> None:
    """B2: bad UTF-8, an over-long prompt and an array for an object fail alone, by their numbers."""
    rows = world.many(1000).splitlines(keepends=True)
    rows[2] = rows[2].replace(b"user", b"us\xffer")
    rows[699] = b"[1, 2]\n"
    stage.gateway.script["c500"] = [world.TOO_LONG]
    job = await stage.run(b"".join(rows))
    assert job.state is model.State.COMPLETED
    assert (job.counts.ok, job.counts.failed, job.counts.retried) == (997, 3, 0)
    errors = {line["error"]["line"]: line for line in stage.errors(1)}
    assert sorted(errors) == [3, 500, 700]
    assert "line 3: not UTF-8" in errors[3]["error"]["message"]
    assert errors[500]["error"]["code"] == "context_length_exceeded"
    assert errors[500]["response"]["status_code"] == 400
    assert "an array" in errors[700]["error"]["message"]
    assert set(stage.gateway.calls.values()) == {1}
    assert sum(stage.gateway.calls.values()) == 998


async def test_b3_counts_agree_with_the_files(stage: batch_stage.Stage) -> None:
    """B3: counts are the lines of each file; a 4xx stands in the error file alone."""
    for bad in ("c2", "c8"):
        stage.gateway.script[bad] = [world.TOO_LONG]
    job = await stage.run(world.many(9))
    assert (job.counts.ok, job.counts.failed) == (7, 2)
    assert len(stage.output(1)) == 7
    assert {line["custom_id"] for line in stage.errors(1)} == {"c2", "c8"}
    assert all(line["error"] for line in stage.errors(1))
    assert all(line["error"] is None for line in stage.output(1))


async def test_b3_all_lines_failed_leaves_no_output_file(stage: batch_stage.Stage) -> None:
    """B3: completed, no output file, and who waits for it hears that nothing came of it."""
    for n in range(1, 4):
        stage.gateway.script[f"c{n}"] = [world.TOO_LONG]
    job = await stage.run(world.many(3))
    assert job.state is model.State.COMPLETED
    assert (job.counts.ok, job.counts.failed) == (0, 3)
    folder = intake.job_folder(stage.state_dir, 1)
    assert not (folder / results.OUTPUT).exists()
    assert len(stage.errors(1)) == 3
    said = await asyncio.to_thread(
        world.run_command, "fqueue", ["--wait", "-j", "1"], stage.api, stage.state_dir
    )
    assert said.code == 1
    assert "0 of 3 lines answered, 3 failed" in said.err


async def test_b6_preemptions_never_count_against_the_cap(stage: batch_stage.Stage) -> None:
    """B6: twelve preemptions and two real failures end well, and never held, under a cap of three."""
    stage.gateway.script["c1"] = [world.PREEMPTED] * 12 + [world.Reply(500, "internal")] * 2
    stage.gateway.script["c2"] = [world.SHED] * 12 + [world.CUT] * 2
    job_id = await stage.submit(world.many(3))
    options = dataclasses.replace(world.QUICK, retry_cap=3)
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url, options):
        job = await stage.store.ended(job_id)
    assert (job.state, job.held, job.requeues) == (model.State.COMPLETED, "", 0)
    assert job.counts == model.Counts(total=3, ok=3, preempted=12, retried=4)
    assert stage.gateway.calls["c1"] == 15
    assert stage.gateway.calls["c2"] == 15
    told = {"c1": list[str | None](), "c2": list[str | None](), "c3": list[str | None]()}
    for headers in stage.gateway.headers:
        told[headers["X-Forebay-Custom-Id"]].append(headers.get("X-Forebay-Preempted"))
    assert told["c1"] == [None, *map(str, range(1, 13)), "12", "12"], "each try says how often"
    assert {*told["c2"], *told["c3"]} == {None}


async def test_a_line_that_fails_too_often_is_given_up_with_its_last_error(
    stage: batch_stage.Stage,
) -> None:
    stage.gateway.script["c2"] = [world.Reply(500, "internal")] * 99
    job = await stage.run(world.many(3))
    assert (job.counts.ok, job.counts.failed, job.counts.retried) == (2, 1, 4)
    assert stage.gateway.calls["c2"] == world.QUICK.retry_cap
    error = stage.errors(1)[0]["error"]
    assert error["message"] == "line 2: given up after 5 failures: said internal"


async def test_a_job_whose_results_cannot_be_made_fails_alone(
    stage: batch_stage.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours in one job must not end the runner, and with it all others."""
    build = results.build

    def breaks(source: results.Source, *others: Any) -> results.Built:
        if source.job_id == 1:
            raise RecursionError("too deep")
        return build(source, *others)

    monkeypatch.setattr(results, "build", breaks)
    jobs = [await stage.submit(world.many(2)) for _ in range(2)]
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        ended = [await stage.store.ended(job_id) for job_id in jobs]
    assert [job.state for job in ended] == [model.State.FAILED, model.State.COMPLETED]
    assert ended[0].reason == model.Reason.LAUNCH_FAILED
    assert "RecursionError: too deep" in ended[0].detail


async def test_a_line_that_kills_a_replica_alone_is_set_aside(stage: batch_stage.Stage) -> None:
    """Not one that was beside it, however often."""
    stage.gateway.script["c1"] = [world.LOST, world.LOST_ALONE]
    stage.gateway.script["c2"] = [world.LOST] * 3
    stage.gateway.script["c3"] = [world.LOST, *[world.LOST_BESIDE] * 9]
    job = await stage.run(world.many(3))
    assert (job.counts.ok, job.counts.failed, job.counts.retried) == (2, 1, 5)
    assert stage.gateway.calls == {"c1": 2, "c2": 4, "c3": 11}
    told = {"c1": list[str | None](), "c2": list[str | None](), "c3": list[str | None]()}
    for headers in stage.gateway.headers:
        told[headers["X-Forebay-Custom-Id"]].append(headers.get("X-Forebay-Lost"))
    assert told["c1"] == [None, "1"], "each try says how many replicas were lost with it"
    assert told["c2"] == [None, "1", "2", "3"]
    assert told["c3"] == [None, *["1"] * 10]
    error = stage.errors(1)[0]["error"]
    assert error["code"] == "poisonous_line"
    assert "2 replicas were lost" in error["message"]


async def test_cancel_ends_lines_in_flight_and_keeps_answers(stage: batch_stage.Stage) -> None:
    stage.gateway.stuck = {f"c{n}" for n in range(11, 21)}
    job_id = await stage.submit(world.many(20))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        await stage.store.until(job_id, lambda job: job.counts.ok == 10)
        assert stage.store.cancel(job_id, 1)
        job = await stage.store.ended(job_id)
    assert job.state is model.State.CANCELLED
    assert job.counts == model.Counts(total=20, ok=10, failed=10)
    assert {line["error"]["code"] for line in stage.errors(1)} == {"batch_cancelled"}
    assert {line["custom_id"] for line in stage.errors(1)} == stage.gateway.stuck
    assert stage.gateway.in_flight == 0


async def test_a_pending_job_is_cancelled_without_a_run(stage: batch_stage.Stage) -> None:
    job_id = await stage.submit(world.many(3), hold=True)
    stage.store.cancel(job_id, 1)
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        job = await stage.store.ended(job_id)
    assert job.state is model.State.CANCELLED
    assert len(stage.errors(job_id)) == 3
    assert not stage.gateway.calls


async def test_time_limit_expires_what_is_open(stage: batch_stage.Stage) -> None:
    stage.gateway.stuck = {"c2"}
    job = await stage.run(world.many(2), time_limit_s=1)
    assert job.state is model.State.TIMEOUT
    assert job.reason == model.Reason.TIME_LIMIT
    assert [line["custom_id"] for line in stage.output(1)] == ["c1"]
    assert stage.errors(1)[0]["error"]["code"] == "batch_expired"


async def test_held_and_later_jobs_wait_with_slurms_reasons(stage: batch_stage.Stage) -> None:
    held = await stage.submit(world.many(1), hold=True)
    later = await stage.submit(world.many(1), begin_us=4_000_000_000_000_000)
    now = await stage.submit(world.many(1))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        await stage.store.ended(now)
        shown = await asyncio.to_thread(stage.api.call, "GET", "/forebay/v1/jobs")
        reasons = {job["job_id"]: (job["state"], job["reason"]) for job in shown.json["jobs"]}
        assert reasons[held] == ("PENDING", "JobHeldUser")
        assert reasons[later] == ("PENDING", "BeginTime")
        assert stage.store.hold(held, "")
        assert (await stage.store.ended(held)).state is model.State.COMPLETED


async def test_lines_that_find_no_room_are_offered_again_until_they_do(
    stage: batch_stage.Stage,
) -> None:
    for n in range(1, 30):
        stage.gateway.script[f"c{n}"] = [world.SHED] * 3
    job = await stage.run(world.many(300))
    assert job.counts == model.Counts(total=300, ok=300)
    assert sum(stage.gateway.calls.values()) == 300 + 29 * 3


async def test_a_fleet_without_room_is_offered_few_lines_again_and_not_all_in_turn(
    stage: batch_stage.Stage,
) -> None:
    enough = asyncio.Event()

    async def count(custom_id: str) -> None:
        if sum(stage.gateway.calls.values()) >= 200:
            enough.set()

    stage.gateway.before = count
    stage.gateway.script = {f"c{n}": [world.SHED] * 200 for n in range(1, 301)}
    job_id = await stage.submit(world.many(300))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        await enough.wait()
        assert len(stage.gateway.calls) <= world.QUICK.first_window
        stage.gateway.script.clear()
        job = await stage.store.ended(job_id)
    assert job.counts == model.Counts(total=300, ok=300)


async def test_a_team_without_quota_says_so_and_slows_no_other(stage: batch_stage.Stage) -> None:
    spent = world.Reply(429, errors.QuotaExceeded.code)
    stage.gateway.script = {f"c{n}": [spent] * 10_000 for n in range(1, 301)}
    poor = await stage.submit(world.many(300))
    stage.api.caller = dataclasses.replace(world.ALICE, team="chemistry", user="bob")
    other = await stage.submit(b"".join(world.line(f"b{n}") for n in range(300)))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        assert (await stage.store.ended(other)).counts.ok == 300
        job = await stage.store.until(poor, lambda job: job.reason != model.Reason.NONE)
        assert job.reason == model.Reason.GROUP_TOKENS
        stage.gateway.script.clear()
        job = await stage.store.ended(poor)
    assert job.counts == model.Counts(total=300, ok=300)


async def test_a_job_that_waits_for_its_teams_lines_says_so(stage: batch_stage.Stage) -> None:
    taken = asyncio.Event()

    async def note(custom_id: str) -> None:
        if stage.gateway.in_flight == 2:
            taken.set()
        await asyncio.Event().wait()

    stage.gateway.before = note
    options = dataclasses.replace(world.QUICK, team_lines=2)
    await stage.submit(world.many(3))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url, options):
        await taken.wait()
        waits = await stage.submit(world.line("w"))
        job = await stage.store.until(waits, lambda job: job.reason == model.Reason.GROUP_LINES)
    assert (job.state, stage.gateway.peak) == (model.State.RUNNING, 2)


async def test_a_small_job_is_not_starved_by_a_big_one(stage: batch_stage.Stage) -> None:
    order: list[str] = []

    async def note(custom_id: str) -> None:
        order.append(custom_id)

    stage.gateway.before = note
    big = await stage.submit(world.many(400))
    other = dataclasses.replace(world.ALICE, team="chemistry", user="bob")
    stage.api.caller = other
    small = await stage.submit(b"".join(world.line(f"s{n}") for n in range(20)))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        await stage.store.ended(small)
        await stage.store.ended(big)
    last = max(at for at, custom_id in enumerate(order) if custom_id.startswith("s"))
    assert last < 200


async def test_a3_polling_a_finished_job_writes_nothing(stage: batch_stage.Stage) -> None:
    job = await stage.run(world.many(5))
    folder = intake.job_folder(stage.state_dir, job.job_id)

    def everything() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    before, calls = everything(), sum(stage.gateway.calls.values())
    for _ in range(60):
        answer = await asyncio.to_thread(stage.api.call, "GET", f"/forebay/v1/jobs/{job.job_id}")
        assert answer.json["state"] == "COMPLETED"
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        pass
    assert everything() == before
    assert sum(stage.gateway.calls.values()) == calls
    assert stage.store.must(job.job_id) == job


async def test_results_are_published_under_the_pattern(
    stage: batch_stage.Stage, tmp_path: Path
) -> None:
    stage.gateway.script["c2"] = [world.TOO_LONG]
    stage.api.caller = dataclasses.replace(world.ALICE, user=_me())
    job = await stage.run(world.many(3), cwd=str(tmp_path), name="night", output="%x-%j.jsonl")
    assert job.state is model.State.COMPLETED
    good = (tmp_path / "night-1.jsonl").read_bytes().splitlines()
    assert sorted(json.loads(text)["custom_id"] for text in good) == ["c1", "c3"]
    assert len((tmp_path / "night-1.err.jsonl").read_bytes().splitlines()) == 1


async def test_an_output_that_is_refused_fails_the_job_and_keeps_the_results(
    stage: batch_stage.Stage, tmp_path: Path
) -> None:
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere")
    stage.api.caller = dataclasses.replace(world.ALICE, user=_me())
    job = await stage.run(world.many(2), cwd=str(tmp_path), output="out.jsonl")
    assert job.state is model.State.FAILED
    assert job.reason == model.Reason.OUTPUT_REFUSED
    assert "symbolic link" in job.detail
    assert not (tmp_path / "elsewhere").exists()
    assert len(stage.output(1)) == 2


@pytest.mark.parametrize(("bad", "code"), [([], 0), (["c2"], 1), (["c1", "c2", "c3"], 1)])
async def test_b3_fbatch_wait_exits_with_the_worst_line(
    stage: batch_stage.Stage, tmp_path: Path, bad: list[str], code: int
) -> None:
    for custom_id in bad:
        stage.gateway.script[custom_id] = [world.TOO_LONG]
    stage.api.caller = dataclasses.replace(world.ALICE, user=_me())
    (tmp_path / "requests.jsonl").write_bytes(world.many(3))
    async with world.daemon_running(stage.store, stage.state_dir, stage.gateway.url):
        argv = ["--wait", "--job-name=n", "requests.jsonl"]
        said = await asyncio.to_thread(world.run_command, "fbatch", argv, stage.api, tmp_path)
    assert said.code == code
    assert said.out == "Submitted batch job 1\n"
    assert (tmp_path / "fbatch-1.jsonl").exists() is (len(bad) < 3)
    assert (tmp_path / "fbatch-1.err.jsonl").exists() is bool(bad)
    if bad:
        assert f"{len(bad)} failed, see {tmp_path}/fbatch-1.err.jsonl" in said.err


def _me() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
