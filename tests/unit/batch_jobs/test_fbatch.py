"""fbatch as a user sees it: words, exit codes, who wins over whom."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import model, options, routes
from scheduler.contracts import command_line, ports, times
from tests.unit.batch_jobs import commanding, world

store = commanding.store  # the fixture
api = commanding.api  # the fixture


def test_a_jsonl_file_is_submitted(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    name = commanding.write(tmp_path, "requests.jsonl", world.many(2))
    said = commanding.fbatch(api, tmp_path, name)
    assert (said.code, said.out) == (0, "Submitted batch job 1\n")
    assert said.err.startswith("fbatch: note: alice is no Unix user")
    assert said.err.endswith("/forebay/v1/jobs/1/output, or submit with --wait\n")
    job = store.must(1)
    assert (job.name, job.source) == ("requests.jsonl", str(tmp_path / name))
    assert commanding.fbatch(api, tmp_path, "--parsable", name).out == "2\n"
    assert commanding.fbatch(api, tmp_path, "-Q", name).out == ""


def test_directive_environment_and_command_line_in_that_order(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    script = commanding.write(tmp_path, "job.fb", commanding.SCRIPT + world.many(2))
    assert commanding.fbatch(api, tmp_path, script).code == 0
    job = store.must(1)
    assert (job.name, job.model, job.time_limit_s, job.comment) == (
        "two words",
        "chat",
        240,
        "second",
    )
    assert (
        commanding.fbatch(api, tmp_path, script, FBATCH_JOB_NAME="env", FBATCH_COMMENT="env").code
        == 0
    )
    assert (store.must(2).name, store.must(2).comment) == ("env", "env")
    assert commanding.fbatch(api, tmp_path, "-J", "cmd", script, FBATCH_JOB_NAME="env").code == 0
    assert store.must(3).name == "cmd"
    assert commanding.fbatch(api, tmp_path, script, FBATCH_HOLD="1").code == 0
    assert commanding.fbatch(api, tmp_path, script, FBATCH_HOLD="no").code == 0
    assert (store.must(4).held, store.must(5).held) == ("user", "")


def test_a_script_and_a_file_together(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    script = commanding.write(tmp_path, "job.fb", commanding.SCRIPT)
    data = commanding.write(tmp_path, "requests.jsonl", world.many(3))
    assert commanding.fbatch(api, tmp_path, script, data).code == 0
    assert (store.must(1).name, store.must(1).counts.total) == ("two words", 3)
    assert "no requests" in commanding.fbatch(api, tmp_path, script).err
    assert commanding.fbatch(api, tmp_path, script, "--hold", data, "-J", "mixed").code == 0
    assert (store.must(2).name, store.must(2).held) == ("mixed", "user")


def test_line_numbers_are_those_of_the_script(api: world.AppApi, tmp_path: Path) -> None:
    script = commanding.write(
        tmp_path, "job.fb", commanding.SCRIPT + world.line("a") + b"not json\n"
    )
    said = commanding.fbatch(api, tmp_path, "--test-only", script)
    assert said.code == 1
    assert said.err.startswith("line 7: not JSON")
    assert said.out.startswith("1 of 2 lines can be run; nothing was submitted\nabout ")


def test_pipes_are_read_whole_and_once(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    script, lines = tmp_path / "script", tmp_path / "lines"
    writers = []
    for pipe, data in ((script, commanding.SCRIPT), (lines, world.many(2000))):
        os.mkfifo(pipe)
        writers.append(threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True))
        writers[-1].start()
    assert commanding.fbatch(api, tmp_path, str(script), str(lines)).code == 0
    for writer in writers:
        writer.join(10)
    job = store.must(1)
    assert (job.counts.total, job.comment, job.source) == (2000, "second", str(lines))
    assert (
        len(world.many(2000)) > 1 << 16
    )  # more than what is looked at to tell a script from requests


def test_requests_come_from_stdin_too(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    assert commanding.fbatch(api, tmp_path, stdin=world.many(2).decode()).code == 0
    assert store.must(1).counts.total == 2
    assert (
        commanding.fbatch(
            api, tmp_path, "-", stdin=commanding.SCRIPT.decode() + world.many(1).decode()
        ).code
        == 0
    )
    assert store.must(2).name == "two words"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
        (["empty.jsonl"], 1, "the file is empty"),
        (["empty.fb"], 1, "the script is empty"),
        (["bare.fb"], 1, "first line must start with #!"),
        (["crlf.fb"], 1, "CRLF"),
        (["stray.fb"], 255, "line 2: 'word' is no option"),
        (["unknown.fb"], 255, "line 3: unrecognized arguments: --nope"),
        (["quote.fb"], 1, 'line 2: a " is never closed'),
        (["a.jsonl", "a.jsonl"], 1, "one file of requests"),
        (["a.jsonl", "a.jsonl", "a.jsonl"], 255, "one file too many"),
        (["--nope", "a.jsonl"], 255, "unrecognized arguments: --nope"),
        (["--ti=5", "a.jsonl"], 255, "ambiguous option: --ti"),
        (["--compan", "a.jsonl"], 255, "unrecognized arguments: --compan"),
        (["--begin=13:00pm", "a.jsonl"], 255, "13:00pm"),
        (["--deadline=2027-02-30", "a.jsonl"], 255, "no such day"),
        (["--order=random", "a.jsonl"], 255, "invalid choice"),
        (["--deadline=2020-01-01", "a.jsonl"], 1, "deadline"),
        (["--strict", "bad.jsonl"], 1, "line 2: not JSON"),
        (["--account=chemistry", "a.jsonl"], 1, "chemistry"),
    ],
)
def test_what_is_refused_in_one_line(
    api: world.AppApi,
    store: world.TellingStore,
    tmp_path: Path,
    argv: list[str],
    code: int,
    words: str,
) -> None:
    commanding.write(tmp_path, "a.jsonl", world.many(1))
    commanding.write(tmp_path, "bad.jsonl", world.many(1) + b"x\n")
    commanding.write(tmp_path, "empty.jsonl", b"")
    commanding.write(tmp_path, "empty.fb", b"")
    commanding.write(tmp_path, "bare.fb", b"echo hi\n")
    commanding.write(tmp_path, "crlf.fb", b"#!/bin/sh\r\n{}\r\n")
    commanding.write(tmp_path, "stray.fb", b"#!/bin/sh\n#FBATCH word\n{}\n")
    commanding.write(tmp_path, "unknown.fb", b"#!/bin/sh\n\n#FBATCH --nope\n{}\n")
    commanding.write(tmp_path, "quote.fb", b'#!/bin/sh\n#FBATCH --comment="x\n{}\n')
    said = commanding.fbatch(api, tmp_path, *argv)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith("fbatch: error: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert store.list() == []


@pytest.mark.parametrize(
    "option",
    [
        "--mail-type=END",
        "--mail-user=a@b",
        "--time-min=3",
        "-pgpu",
    ],
)
def test_what_there_is_not_here_is_refused_wherever_it_is_said(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path, option: str
) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(1))
    script = commanding.write(
        tmp_path, "job.fb", f"#!/bin/sh\n#FBATCH {option}\n".encode() + world.many(1)
    )
    for said in (
        commanding.fbatch(api, tmp_path, option, name),
        commanding.fbatch(api, tmp_path, script),
    ):
        assert said.code == 255
        assert "leave it out" in said.err
        assert said.err.count("\n") == 1
    assert store.list() == []


def test_the_environment_too_is_never_ignored_in_silence(api: world.AppApi, tmp_path: Path) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(1))
    assert commanding.fbatch(api, tmp_path, name, FBATCH_MAIL_TYPE="END").code == 255


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:00", 240),
        ("2-12", 60 * 3600),
        ("3-0:00", 72 * 3600),
        ("30", 1800),
        ("0", 0),
        ("UNLIMITED", 0),
    ],
)
def test_b7_durations_of_time(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path, text: str, seconds: int
) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(1))
    assert commanding.fbatch(api, tmp_path, f"--time={text}", name).code == 0
    assert store.must(1).time_limit_s == seconds


@pytest.mark.parametrize("text", ["2-", "1h", "1:", "1-2-3"])
def test_b7_durations_that_are_none(api: world.AppApi, tmp_path: Path, text: str) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(1))
    said = commanding.fbatch(api, tmp_path, f"--time={text}", name)
    assert said.code == 255
    assert "invalid time limit" in said.err


def test_times_are_read_in_the_users_zone() -> None:
    tz = times.local_zone({"TZ": "Europe/Berlin"})
    now_us = 1_780_000_000_000_000  # 2026-05-28T20:26:40Z
    wish = options.submission({"begin": "23:00", "deadline": "now+1hour"}, now_us=now_us, tz=tz)
    assert wish["begin_us"] == 1_780_002_000_000_000  # 21:00Z, summer time
    assert wish["deadline_us"] == now_us + 3_600_000_000


def test_bad_lines_are_told_and_the_others_submitted(api: world.AppApi, tmp_path: Path) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(1) + b"x\n")
    said = commanding.fbatch(api, tmp_path, name)
    assert (said.code, said.out) == (0, "Submitted batch job 1\n")
    assert said.err.startswith(
        "fbatch: warning: 1 of 2 lines can't be run, the first is line 2: not JSON"
    )


def test_help_fits_a_screen(
    api: world.AppApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("fbatch", "fqueue", "fcancel"):
        assert world.run_command(command, ["--help"], api, tmp_path).code == 0
        text = capsys.readouterr().out
        assert "examples:" in text
        assert len(text.splitlines()) <= 45


def test_a_place_that_would_refuse_the_results_is_refused_at_once(
    api: world.AppApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.jsonl").write_bytes(world.many(1))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/proc"))
    for name, words in (
        ("nowhere/out.jsonl", "nowhere: there is no such folder: make it"),
        ("/proc/out.jsonl", "/proc: you may not write there"),
        ("link", "link: is a symbolic link, which results never go through"),
    ):
        for option in ("output", "error"):
            argv = [f"--{option}={name}", "r.jsonl"]
            said = world.run_command("fbatch", argv, api, tmp_path)
            assert said.code == 1
            assert said.err.startswith(f"fbatch: error: --{option}: ")
            assert words in said.err
            assert said.err.count("\n") == 1
    assert api.client.get(routes.PREFIX).json() == {"jobs": []}


@pytest.mark.parametrize(("argv", "states"), [([], ["CANCELLED"]), (["--test-only"], [])])
def test_a_file_that_changes_while_it_is_read_is_not_run(
    api: world.AppApi,
    store: world.TellingStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    states: list[str],
) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(2))
    call = api.call

    def meanwhile(method: str, path: str, **rest: Any) -> ports.ApiResponse:
        answer = call(method, path, **rest)
        with (tmp_path / "a.jsonl").open("ab") as file:
            file.write(world.line("late"))
        return answer

    monkeypatch.setattr(api, "call", meanwhile)
    said = commanding.fbatch(api, tmp_path, *argv, name)
    assert said.code == 1
    assert "a.jsonl changed while it was read" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    for job in store.list():
        assert job.cancel_us or job.state is model.State.CANCELLED
    assert len(store.list()) == len(states)


def test_a_file_that_changes_while_the_gateway_goes_away_leaves_no_job_unsaid(
    api: world.AppApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(2))
    call = api.call

    def meanwhile(method: str, path: str, **rest: Any) -> ports.ApiResponse:
        if path.endswith("/cancel"):
            raise command_line.Unanswered("the gateway does not answer")
        answer = call(method, path, **rest)
        with (tmp_path / "a.jsonl").open("ab") as file:
            file.write(world.line("late"))
        return answer

    monkeypatch.setattr(api, "call", meanwhile)
    said = commanding.fbatch(api, tmp_path, name)
    assert said.code == 1
    assert "changed while it was read, batch job 1 was not cancelled: fcancel 1" in said.err


def test_results_never_go_over_the_file_that_they_are_of(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    name = commanding.write(tmp_path, "requests.jsonl", world.many(1))
    (tmp_path / "same").hardlink_to(tmp_path / name)
    for option in (f"--output={name}", f"--error={name}", "--output=same"):
        said = commanding.fbatch(api, tmp_path, option, name)
        assert (said.code, "is the submitted file itself" in said.err) == (1, True), said
    assert store.list() == []


def test_what_the_queue_goes_by_is_submitted_and_shown(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    name = commanding.write(tmp_path, "a.jsonl", world.many(1))
    assert commanding.fbatch(api, tmp_path, name).code == 0
    options = ("--dependency=afterany:1", "--no-requeue", "--priority=-3", "--format=parquet")
    assert commanding.fbatch(api, tmp_path, *options, name).code == 0
    job = store.must(2)
    assert (job.dependency, job.requeue, job.priority, job.format) == (
        "afterany:1",
        False,
        -3,
        "parquet",
    )
    assert commanding.fbatch(api, tmp_path, "--priority=x", name).code == 255
    assert commanding.fbatch(api, tmp_path, "--qos=high", name).code == 1
    said = world.run_command("fqueue", ("-h", "--sort=-i", "-o", "%i %E %q %f"), api, tmp_path)
    assert said.out == "2 afterany:1 normal 1.000000\n1 (null) normal 1.000000\n"
    store.update(2, {"expected_us": 1_700_000_000_000_000, "estimated_us": 1_600_000_000_000_000})
    said = world.run_command("fqueue", ("-h", "--start", "-j", "2"), api, tmp_path)
    assert "2023-11-14T22:13:20 2020-09-13T12:26:40" in said.out
    assert world.run_command("fqueue", ("-S", "9"), api, tmp_path).code == 1
