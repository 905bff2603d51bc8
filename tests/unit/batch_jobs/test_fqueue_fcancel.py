"""fqueue and fcancel as a user sees them: what is listed, what is asked before jobs end."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import model
from scheduler.contracts import command_line, ports
from tests.unit.batch_jobs import commanding, world

store = commanding.store  # the fixture
api = commanding.api  # the fixture


def test_fqueue_lists_what_has_not_ended(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        api.submit(world.many(2), name=name)
    store.move(store.must(1), model.Event.FAIL)
    said = world.run_command("fqueue", [], api, tmp_path)
    assert said.code == 0
    assert [row.split()[0] for row in said.out.splitlines()] == ["JOBID", "2"]
    said = world.run_command("fqueue", ["-h", "-t", "all", "-o", "%i %T %D"], api, tmp_path)
    assert said.out == "1 FAILED 0/2\n2 PENDING 0/2\n"
    assert world.run_command("fqueue", ["-h", "-j", "1", "-o", "%i"], api, tmp_path).out == "1\n"
    assert (
        world.run_command("fqueue", ["-h", "-n", "two", "-o", "%j"], api, tmp_path).out == "two\n"
    )
    said = world.run_command("fqueue", ["--me", "--json"], api, tmp_path)
    assert [job["job_id"] for job in json.loads(said.out)["jobs"]] == [2]
    said = world.run_command("fqueue", ["-h"], api, tmp_path, FQUEUE_FORMAT="%u")
    assert said.out == "alice\n"


def test_fqueue_again_and_again(api: world.AppApi, tmp_path: Path) -> None:
    from batch_jobs import commands

    def interrupt(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    pauses: list[float] = []
    out = io.StringIO()
    code = commands.fqueue(
        ["-i", "2"], api=api, out=out, err=io.StringIO(), env={"TZ": "UTC"}, cwd=tmp_path,
        stdin=io.StringIO(), pause=interrupt,
    )  # fmt: skip
    assert (code, pauses) == (130, [2.0, 2.0])
    assert (
        len(re.findall(r"^\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}$", out.getvalue(), re.MULTILINE))
        == 2
    )


def test_fqueue_looks_again_though_the_gateway_does_not_answer(
    api: world.AppApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As squeue -i does; without -i it ends with the error."""
    from batch_jobs import commands

    call, asked = api.call, 0

    def flaky(*about: Any, **more: Any) -> ports.ApiResponse:
        nonlocal asked
        asked += 1
        if asked != 2:
            raise command_line.Unanswered("the gateway does not answer")
        return call(*about, **more)

    def pause(seconds: float) -> None:
        if asked == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(api, "call", flaky)
    out, err = io.StringIO(), io.StringIO()
    code = commands.fqueue(
        ["-h", "-i", "2"], api=api, out=out, err=err, env={"TZ": "UTC"}, cwd=tmp_path,
        stdin=io.StringIO(), pause=pause,
    )  # fmt: skip
    assert (code, asked) == (130, 3)
    assert err.getvalue().splitlines()[:-1] == ["fqueue: error: the gateway does not answer"] * 2
    assert len(out.getvalue().splitlines()) == 1
    assert world.run_command("fqueue", [], api, tmp_path).code == 1


@pytest.mark.parametrize(
    "argv", [["-t", "XX"], ["-j", "x"], ["-o", "%w"], ["-i", "0"], ["-S", "9"]]
)
def test_fqueue_refuses(api: world.AppApi, tmp_path: Path, argv: list[str]) -> None:
    said = world.run_command("fqueue", argv, api, tmp_path)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("fqueue: error: ")
    assert " _" not in said.err, "no name of a function of ours"


def test_fcancel_one_asks_nobody(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    api.submit(world.many(1))
    assert world.run_command("fcancel", ["1"], api, tmp_path) == world.Said(0, "", "")
    assert store.must(1).cancel_us


def test_fcancel_more_than_one_asks(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for _ in range(3):
        api.submit(world.many(1))
    said = world.run_command("fcancel", ["--me"], api, tmp_path)
    assert said.code == 1
    assert "Cancel 3 jobs (1, 2, 3)?" in said.err
    assert not any(job.cancel_us for job in store.list())
    assert (
        world.run_command("fcancel", ["1,2"], api, tmp_path, commanding.Terminal("n\n")).code == 1
    )
    assert not any(job.cancel_us for job in store.list())
    assert (
        world.run_command(
            "fcancel", ["1", "-Q", "2"], api, tmp_path, commanding.Terminal("y\n")
        ).code
        == 0
    )
    assert world.run_command("fcancel", ["--me", "-y"], api, tmp_path).code == 0
    assert all(job.cancel_us for job in store.list())


def test_fcancel_interactive_asks_for_each(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for _ in range(2):
        api.submit(world.many(1))
    assert (
        world.run_command(
            "fcancel", ["-i", "1", "2"], api, tmp_path, commanding.Terminal("n\ny\n")
        ).code
        == 0
    )
    assert (bool(store.must(1).cancel_us), bool(store.must(2).cancel_us)) == (False, True)


def test_fcancel_by_name_and_state(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for name in ("x", "y"):
        api.submit(world.many(1), name=name)
    assert world.run_command("fcancel", ["-n", "y", "-t", "PD"], api, tmp_path).code == 0
    assert (bool(store.must(1).cancel_us), bool(store.must(2).cancel_us)) == (False, True)
    assert world.run_command("fcancel", ["-t", "R"], api, tmp_path).code == 0
    assert not store.must(1).cancel_us


def test_fcancel_says_what_it_could_not(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    api.submit(world.many(1))
    said = world.run_command("fcancel", ["-y", "9", "1_2", "1"], api, tmp_path)
    assert said.code == 1
    assert "no job 9" in said.err
    assert "no job 1_2" in said.err
    assert store.must(1).cancel_us
    store.move(store.must(1), model.Event.FAIL)
    assert "ended already" in world.run_command("fcancel", ["1"], api, tmp_path).err
    assert world.run_command("fcancel", ["-Q", "1"], api, tmp_path) == world.Said(0, "", "")
    for argv in ([], ["x"], ["1_"]):
        assert world.run_command("fcancel", argv, api, tmp_path).code == 1


def test_fcancel_does_not_reach_others(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    api.submit(world.many(1))
    api.caller = dataclasses.replace(world.ALICE, user="bob")
    assert world.run_command("fcancel", ["1"], api, tmp_path).code == 1
    assert not store.must(1).cancel_us


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--signal=USR1", "1"], 1, "--signal: 'USR1': requests get no signals"),
        (["--partition=debug", "1"], 1, "--partition: 'debug': batch jobs are of tier batch alone"),
        (["--signal=SIGTERM", "1"], 0, ""),
        (["-s", "9", "1"], 0, ""),
        (["-p", "batch", "-y"], 0, ""),
    ],
)
def test_fcancel_takes_scancels_signals_that_mean_it(
    api: world.AppApi,
    store: world.TellingStore,
    tmp_path: Path,
    argv: list[str],
    code: int,
    words: str,
) -> None:
    api.submit(world.many(1))
    said = world.run_command("fcancel", argv, api, tmp_path)
    assert said.code == code
    assert words in said.err
    assert bool(store.must(1).cancel_us) is not bool(code)
