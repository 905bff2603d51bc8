"""fbatch, fqueue and fcancel as a user sees them: words, exit codes, who wins over whom."""

import dataclasses
import io
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import model, options, routes, waiting
from scheduler.contracts import command_line, ports, times
from tests.unit.batch_jobs import world

SCRIPT = b"""#!/bin/sh
#FBATCH --model=chat --job-name="two words"   # a comment
#FBATCH --time=4:00
#FBATCH --comment=first
#FBATCH --comment=second
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[world.TellingStore]:
    found = world.open_store(tmp_path / "state")
    yield found
    found.close()


@pytest.fixture
def api(store: world.TellingStore, tmp_path: Path) -> world.AppApi:
    return world.AppApi(store, tmp_path / "state")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(exist_ok=True)


def write(tmp_path: Path, name: str, data: bytes) -> str:
    (tmp_path / name).write_bytes(data)
    return name


def fbatch(api: ports.Api, cwd: Path, *argv: str, stdin: str = "", **env: str) -> world.Said:
    return world.run_command("fbatch", argv, api, cwd, io.StringIO(stdin), **env)


def test_a_jsonl_file_is_submitted(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    name = write(tmp_path, "requests.jsonl", world.many(2))
    said = fbatch(api, tmp_path, name)
    assert (said.code, said.out) == (0, "Submitted batch job 1\n")
    assert said.err.startswith("fbatch: note: alice is no Unix user")
    assert said.err.endswith("/forebay/v1/jobs/1/output, or submit with --wait\n")
    job = store.must(1)
    assert (job.name, job.source) == ("requests.jsonl", str(tmp_path / name))
    assert fbatch(api, tmp_path, "--parsable", name).out == "2\n"
    assert fbatch(api, tmp_path, "-Q", name).out == ""


def test_directive_environment_and_command_line_in_that_order(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    script = write(tmp_path, "job.fb", SCRIPT + world.many(2))
    assert fbatch(api, tmp_path, script).code == 0
    job = store.must(1)
    assert (job.name, job.model, job.time_limit_s, job.comment) == (
        "two words",
        "chat",
        240,
        "second",
    )
    assert fbatch(api, tmp_path, script, FBATCH_JOB_NAME="env", FBATCH_COMMENT="env").code == 0
    assert (store.must(2).name, store.must(2).comment) == ("env", "env")
    assert fbatch(api, tmp_path, "-J", "cmd", script, FBATCH_JOB_NAME="env").code == 0
    assert store.must(3).name == "cmd"
    assert fbatch(api, tmp_path, script, FBATCH_HOLD="1").code == 0
    assert fbatch(api, tmp_path, script, FBATCH_HOLD="no").code == 0
    assert (store.must(4).held, store.must(5).held) == ("user", "")


def test_a_script_and_a_file_together(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    script = write(tmp_path, "job.fb", SCRIPT)
    data = write(tmp_path, "requests.jsonl", world.many(3))
    assert fbatch(api, tmp_path, script, data).code == 0
    assert (store.must(1).name, store.must(1).counts.total) == ("two words", 3)
    assert "no requests" in fbatch(api, tmp_path, script).err
    assert fbatch(api, tmp_path, script, "--hold", data, "-J", "mixed").code == 0
    assert (store.must(2).name, store.must(2).held) == ("mixed", "user")


def test_line_numbers_are_those_of_the_script(api: world.AppApi, tmp_path: Path) -> None:
    script = write(tmp_path, "job.fb", SCRIPT + world.line("a") + b"not json\n")
    said = fbatch(api, tmp_path, "--test-only", script)
    assert said.code == 1
    assert said.err.startswith("line 7: not JSON")
    assert said.out.startswith("1 of 2 lines can be run; nothing was submitted\nabout ")


def test_pipes_are_read_whole_and_once(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    script, lines = tmp_path / "script", tmp_path / "lines"
    writers = []
    for pipe, data in ((script, SCRIPT), (lines, world.many(2000))):
        os.mkfifo(pipe)
        writers.append(threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True))
        writers[-1].start()
    assert fbatch(api, tmp_path, str(script), str(lines)).code == 0
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
    assert fbatch(api, tmp_path, stdin=world.many(2).decode()).code == 0
    assert store.must(1).counts.total == 2
    assert fbatch(api, tmp_path, "-", stdin=SCRIPT.decode() + world.many(1).decode()).code == 0
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
    write(tmp_path, "a.jsonl", world.many(1))
    write(tmp_path, "bad.jsonl", world.many(1) + b"x\n")
    write(tmp_path, "empty.jsonl", b"")
    write(tmp_path, "empty.fb", b"")
    write(tmp_path, "bare.fb", b"echo hi\n")
    write(tmp_path, "crlf.fb", b"#!/bin/sh\r\n{}\r\n")
    write(tmp_path, "stray.fb", b"#!/bin/sh\n#FBATCH word\n{}\n")
    write(tmp_path, "unknown.fb", b"#!/bin/sh\n\n#FBATCH --nope\n{}\n")
    write(tmp_path, "quote.fb", b'#!/bin/sh\n#FBATCH --comment="x\n{}\n')
    said = fbatch(api, tmp_path, *argv)
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
    name = write(tmp_path, "a.jsonl", world.many(1))
    script = write(tmp_path, "job.fb", f"#!/bin/sh\n#FBATCH {option}\n".encode() + world.many(1))
    for said in (fbatch(api, tmp_path, option, name), fbatch(api, tmp_path, script)):
        assert said.code == 255
        assert "leave it out" in said.err
        assert said.err.count("\n") == 1
    assert store.list() == []


def test_the_environment_too_is_never_ignored_in_silence(api: world.AppApi, tmp_path: Path) -> None:
    name = write(tmp_path, "a.jsonl", world.many(1))
    assert fbatch(api, tmp_path, name, FBATCH_MAIL_TYPE="END").code == 255


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
    name = write(tmp_path, "a.jsonl", world.many(1))
    assert fbatch(api, tmp_path, f"--time={text}", name).code == 0
    assert store.must(1).time_limit_s == seconds


@pytest.mark.parametrize("text", ["2-", "1h", "1:", "1-2-3"])
def test_b7_durations_that_are_none(api: world.AppApi, tmp_path: Path, text: str) -> None:
    name = write(tmp_path, "a.jsonl", world.many(1))
    said = fbatch(api, tmp_path, f"--time={text}", name)
    assert said.code == 255
    assert "invalid time limit" in said.err


def test_times_are_read_in_the_users_zone() -> None:
    tz = times.local_zone({"TZ": "Europe/Berlin"})
    now_us = 1_780_000_000_000_000  # 2026-05-28T20:26:40Z
    wish = options.submission({"begin": "23:00", "deadline": "now+1hour"}, now_us=now_us, tz=tz)
    assert wish["begin_us"] == 1_780_002_000_000_000  # 21:00Z, summer time
    assert wish["deadline_us"] == now_us + 3_600_000_000


def test_bad_lines_are_told_and_the_others_submitted(api: world.AppApi, tmp_path: Path) -> None:
    name = write(tmp_path, "a.jsonl", world.many(1) + b"x\n")
    said = fbatch(api, tmp_path, name)
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


class Scenes:
    """An Api that shows a job's life, one scene a poll; None: the gateway does not answer."""

    def __init__(self, *scenes: model.BatchJob | None) -> None:
        self.scenes = list(scenes)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> ports.ApiResponse:
        if method == "POST":
            answer = {"job_id": 7, "lines": 4, "bad_lines": 0, "errors": [], "output_path": "/x"}
            return ports.ApiResponse(200, answer, b"")
        scene = self.scenes.pop(0)
        if scene is None:
            raise command_line.CommandError("gateway does not answer")
        return ports.ApiResponse(200, scene.public(0), b"")


def scene(state: model.State, ok: int, failed: int = 0) -> model.BatchJob:
    counts = model.Counts(total=4, ok=ok, failed=failed)
    return model.BatchJob(
        7,
        "t",
        "u",
        state=state,
        counts=counts,
        output_path="/x/fbatch-%j.jsonl",
        error_path="/x/fbatch-%j.err.jsonl",
    )


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (scene(model.State.COMPLETED, 4), 0),
        (scene(model.State.COMPLETED, 3, 1), 1),
        (scene(model.State.CANCELLED, 2, 2), 1),
        (scene(model.State.FAILED, 4), 1),
        (scene(model.State.TIMEOUT, 0, 4), 1),
    ],
)
def test_wait_exits_with_the_worst_line(tmp_path: Path, last: model.BatchJob, code: int) -> None:
    name = write(tmp_path, "a.jsonl", world.many(4))
    scenes = Scenes(scene(model.State.PENDING, 0), None, scene(model.State.RUNNING, 2), last)
    out, err = io.StringIO(), io.StringIO()
    paused: list[float] = []
    from batch_jobs import commands

    found = commands.fbatch(
        ["--wait", name], api=scenes, out=out, err=err, env={}, cwd=tmp_path,
        stdin=io.StringIO(), pause=paused.append,
    )  # fmt: skip
    assert found == code
    assert out.getvalue() == "Submitted batch job 7\n"
    lines = err.getvalue().splitlines()
    assert lines[:2] == ["job 7 PENDING 0/4", "job 7 RUNNING 2/4"]
    assert lines[2].startswith(f"job 7 {last.state}: {last.counts.ok} of 4 lines answered")
    assert ("fbatch-7.err.jsonl" in lines[2]) is bool(last.counts.failed)
    assert len(paused) == 3


class Terminal(io.StringIO):
    """A stream that says it is a terminal, with someone who types."""

    def isatty(self) -> bool:
        return True


def test_a_bar_only_on_a_terminal_and_not_with_no_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batch_jobs import waiting

    def shown() -> str:
        err = Terminal()
        scenes = Scenes(scene(model.State.RUNNING, 2), scene(model.State.COMPLETED, 4))
        assert (
            waiting.until_done(7, api=scenes, err=err, pause=lambda _: None, folder=tmp_path) == 0
        )
        return err.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown()
    assert "\x1b[" in text
    for words in ("job 7 COMPLETED", "4/4", "tokens/s", "0 preempted"):
        assert words in text, "nothing is cut on a line of 80"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shown()


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


def test_fqueue_waits_for_jobs_that_were_submitted_before(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    said = world.run_command("fqueue", ["--wait"], api, tmp_path)
    assert (said.code, said.err) == (
        1,
        "fqueue: error: --wait: for which jobs? Give -j with their ids\n",
    )
    for failed in (0, 1):
        job = store.must(api.submit(world.many(1)))
        counts = model.Counts(total=1, ok=1 - failed, failed=failed)
        store.move(store.move(job, model.Event.START), model.Event.FAIL, counts=counts)
    said = world.run_command("fqueue", ["--wait", "-j", "1,2"], api, tmp_path)
    assert said.code == 1
    assert "job 1 FAILED" in said.err
    assert "job 2 FAILED" in said.err
    said = world.run_command("fqueue", ["--wait", "-j", "1,7"], api, tmp_path)
    assert (said.code, said.err) == (
        1,
        "fqueue: error: --wait: there is no job 7, or it is not yours\n",
    )


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (command_line.Unanswered("nobody there"), waiting.UNANSWERED),
        (command_line.CommandError("no"), 1),
    ],
)
def test_a_gateway_that_is_away_for_a_minute_is_told_from_a_refusal(
    fault: command_line.CommandError, code: int
) -> None:
    waited: list[float] = []

    def ask() -> None:
        raise fault

    with pytest.raises(command_line.CommandError) as raised:
        waiting.patiently(ask, waited.append)
    assert raised.value.code == code
    assert 55 <= sum(waited) <= 60
    answers = iter([command_line.Unanswered("not yet"), None])

    def later() -> str:
        if (answer := next(answers)) is not None:
            raise answer
        return "here"

    assert waiting.patiently(later, waited.append) == "here"


def test_a_minute_is_a_minute_though_each_try_takes_half_of_it() -> None:
    now, tries = [0.0], 0

    def ask() -> None:
        nonlocal tries
        tries += 1
        now[0] += 29.5
        raise command_line.Unanswered("no answer in 29 s")

    with pytest.raises(command_line.Unanswered):
        waiting.patiently(ask, lambda _: None, lambda: now[0])
    assert tries == 2


class Following:
    """An API whose job has ended, with answers to follow; it fails once when some are printed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, **_: Any
    ) -> ports.ApiResponse:
        if not path.endswith("/follow"):
            return ports.ApiResponse(200, scene(model.State.COMPLETED, 4).public(0), b"")
        assert params is not None
        self.asked.append(params["after"])
        if self.asked == ["0", "1"]:
            raise command_line.Unanswered("restarts")
        said = {"0": ("1", ["a\n"]), "1": ("2", ["b\n"]), "2": ("2", [])}[params["after"]]
        return ports.ApiResponse(200, dict(zip(("next", "lines"), said, strict=True)), b"")


def test_answers_are_printed_once_though_the_gateway_restarts_between_them() -> None:
    out = io.StringIO()
    waiting.until_done(
        7, api=Following(), err=io.StringIO(), pause=lambda _: None, folder=None, follow=out
    )
    assert out.getvalue() == "a\nb\n"


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


@pytest.mark.parametrize(
    "argv", [["-t", "XX"], ["-j", "x"], ["-o", "%w"], ["-i", "0"], ["-S", "9"]]
)
def test_fqueue_refuses(api: world.AppApi, tmp_path: Path, argv: list[str]) -> None:
    said = world.run_command("fqueue", argv, api, tmp_path)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("fqueue: error: ")


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
    assert world.run_command("fcancel", ["1,2"], api, tmp_path, Terminal("n\n")).code == 1
    assert not any(job.cancel_us for job in store.list())
    assert world.run_command("fcancel", ["1", "-Q", "2"], api, tmp_path, Terminal("y\n")).code == 0
    assert world.run_command("fcancel", ["--me", "-y"], api, tmp_path).code == 0
    assert all(job.cancel_us for job in store.list())


def test_fcancel_interactive_asks_for_each(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for _ in range(2):
        api.submit(world.many(1))
    assert (
        world.run_command("fcancel", ["-i", "1", "2"], api, tmp_path, Terminal("n\ny\n")).code == 0
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


@pytest.mark.parametrize(("argv", "states"), [([], ["CANCELLED"]), (["--test-only"], [])])
def test_a_file_that_changes_while_it_is_read_is_not_run(
    api: world.AppApi,
    store: world.TellingStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    states: list[str],
) -> None:
    name = write(tmp_path, "a.jsonl", world.many(2))
    call = api.call

    def meanwhile(method: str, path: str, **rest: Any) -> ports.ApiResponse:
        answer = call(method, path, **rest)
        with (tmp_path / "a.jsonl").open("ab") as file:
            file.write(world.line("late"))
        return answer

    monkeypatch.setattr(api, "call", meanwhile)
    said = fbatch(api, tmp_path, *argv, name)
    assert said.code == 1
    assert "a.jsonl changed while it was read" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    for job in store.list():
        assert job.cancel_us or job.state is model.State.CANCELLED
    assert len(store.list()) == len(states)


def test_results_never_go_over_the_file_that_they_are_of(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    name = write(tmp_path, "requests.jsonl", world.many(1))
    (tmp_path / "same").hardlink_to(tmp_path / name)
    for option in (f"--output={name}", f"--error={name}", "--output=same"):
        said = fbatch(api, tmp_path, option, name)
        assert (said.code, "is the submitted file itself" in said.err) == (1, True), said
    assert store.list() == []


def test_an_array_takes_a_file_for_each_task_or_the_same_for_all(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for task in (0, 2):
        write(tmp_path, f"in-{task}.jsonl", world.many(task + 1))
    said = fbatch(api, tmp_path, "--array=0-2:2%1", "--parsable", "in-%a.jsonl")
    assert (said.code, said.out) == (0, "1\n")
    assert [(job.shown_id, job.counts.total, job.array_limit) for job in store.list()] == [
        ("1_0", 1, 1),
        ("1_2", 3, 1),
    ]
    script = write(tmp_path, "job.fb", b"#!/bin/sh\n#FBATCH -a 5-6\n" + world.many(1))
    assert fbatch(api, tmp_path, script).out == "Submitted batch job 3\n"
    assert [job.shown_id for job in store.list()][2:] == ["3_5", "3_6"]
    listed = world.run_command("fqueue", ("-h", "-r", "-o", "%i %F %K"), api, tmp_path)
    assert listed.out == "1_0 1 0\n1_2 1 2\n3_5 3 5\n3_6 3 6\n"
    for named, shown in (("1", "1_0\n1_2\n"), ("1_2,3_5", "1_2\n3_5\n"), ("4", "3_6\n"), ("9", "")):
        rows = world.run_command("fqueue", ("-h", "-r", "-j", named, "-o", "%i"), api, tmp_path)
        assert rows.out == shown
    listed = world.run_command("fqueue", ("-h", "-o", "%i %F %K %D"), api, tmp_path)
    assert listed.out == "1_[0,2%1] 1 0,2%1 0/4\n3_[5-6] 3 5-6 0/2\n"
    listed = world.run_command("fqueue", ("-h", "-j", "1_2,3", "-o", "%i"), api, tmp_path)
    assert listed.out == "1_2\n3_[5-6]\n"
    assert world.run_command("fcancel", ("--me", "-t", "R", "3_5", "-y"), api, tmp_path).code == 0
    assert not any(job.cancel_us for job in store.list())
    assert world.run_command("fcancel", ("3_6", "1", "-y"), api, tmp_path).code == 0
    assert [bool(job.cancel_us) for job in store.list()] == [True, True, False, True]


def test_an_array_that_breaks_off_leaves_no_task_behind(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    write(tmp_path, "in-0.jsonl", world.many(1))
    said = fbatch(api, tmp_path, "--array=0-1", "in-%a.jsonl")
    assert said.code == 1
    assert "in-1.jsonl" in said.err
    assert [bool(job.cancel_us) for job in store.list()] == [True]
    assert fbatch(api, tmp_path, "in-%a.jsonl").code == 255
    assert fbatch(api, tmp_path, "--array=3-1", "in-0.jsonl").code == 255


@pytest.mark.parametrize("how", ["gone", "interrupted"])
def test_an_array_whose_file_goes_midway_leaves_no_task_behind(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path, how: str
) -> None:
    """Each task's file is read again: by then it may be gone, or whoever waits may have pressed Ctrl-C."""
    name = write(tmp_path, "requests.jsonl", world.many(1))

    class Midway(world.AppApi):
        def call(self, method: str, path: str, **more: Any) -> ports.ApiResponse:
            if more.get("upload") is not None and len(store.list()) == 2:
                if how == "interrupted":
                    raise KeyboardInterrupt
                (tmp_path / name).unlink()
            return super().call(method, path, **more)

    said = fbatch(Midway(store, tmp_path / "state"), tmp_path, "--array=0-4", name)
    assert said.code == (130 if how == "interrupted" else 1)
    assert "batch job 1, 2 was cancelled" in said.err
    assert ("requests.jsonl: No such file" in said.err) == (how == "gone")
    assert [bool(job.cancel_us) for job in store.list()] == [True, True]


def test_what_the_queue_goes_by_is_submitted_and_shown(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    name = write(tmp_path, "a.jsonl", world.many(1))
    assert fbatch(api, tmp_path, name).code == 0
    options = ("--dependency=afterany:1", "--no-requeue", "--priority=-3", "--format=parquet")
    assert fbatch(api, tmp_path, *options, name).code == 0
    job = store.must(2)
    assert (job.dependency, job.requeue, job.priority, job.format) == (
        "afterany:1",
        False,
        -3,
        "parquet",
    )
    assert fbatch(api, tmp_path, "--priority=x", name).code == 255
    assert fbatch(api, tmp_path, "--qos=high", name).code == 1
    said = world.run_command("fqueue", ("-h", "--sort=-i", "-o", "%i %E %q %f"), api, tmp_path)
    assert said.out == "2 afterany:1 normal 1.000000\n1 (null) normal 1.000000\n"
    store.update(2, {"expected_us": 1_700_000_000_000_000, "estimated_us": 1_600_000_000_000_000})
    said = world.run_command("fqueue", ("-h", "--start", "-j", "2"), api, tmp_path)
    assert "2023-11-14T22:13:20 2020-09-13T12:26:40" in said.out
    assert world.run_command("fqueue", ("-S", "9"), api, tmp_path).code == 1


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
