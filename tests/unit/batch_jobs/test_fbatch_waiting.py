"""fbatch --wait and fqueue --wait: what is shown meanwhile, exit codes, a gateway that is away."""

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import model, waiting
from scheduler.contracts import command_line, ports
from tests.unit.batch_jobs import commanding, world

store = commanding.store  # the fixture
api = commanding.api  # the fixture


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
    name = commanding.write(tmp_path, "a.jsonl", world.many(4))
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
    assert lines[:4] == [
        "job 7 PENDING 0/4",
        "job 7: gateway does not answer; waiting, a minute at most",
        "job 7: the gateway answers again",
        "job 7 RUNNING 2/4",
    ]
    assert lines[4].startswith(f"job 7 {last.state}: {last.counts.ok} of 4 lines answered")
    assert ("fbatch-7.err.jsonl" in lines[4]) is bool(last.counts.failed)
    assert len(paused) == 3


def test_a_bar_only_on_a_terminal_and_not_with_no_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batch_jobs import waiting

    def shown() -> str:
        err = commanding.Terminal()
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
        (command_line.Unanswered("nobody there"), command_line.UNANSWERED),
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
        command_line.patiently(ask, waited.append)
    assert raised.value.code == code
    assert 55 <= sum(waited) <= 60
    answers = iter([command_line.Unanswered("not yet"), None])

    def later() -> str:
        if (answer := next(answers)) is not None:
            raise answer
        return "here"

    assert command_line.patiently(later, waited.append) == "here"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_gateway_that_is_away_is_told_once_and_that_it_is_back_once(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    running, ended = scene(model.State.RUNNING, 2), scene(model.State.COMPLETED, 4)
    away = [running, None, None, running, None, None, None, ended]
    err = commanding.Terminal() if terminal else io.StringIO()
    code = waiting.until_done(
        7, api=Scenes(*away), err=err, pause=lambda _: None, folder=None, follow=None
    )
    text = " ".join(err.getvalue().split())
    assert code == 0
    assert text.count("job 7: gateway does not answer; waiting, a minute at most") == 2
    assert text.count("job 7: the gateway answers again") == 2
    quiet = io.StringIO()
    waiting.until_done(
        7, api=Scenes(*away), err=quiet, pause=lambda _: None, folder=None, quiet=True
    )
    assert not quiet.getvalue()


def test_results_are_fetched_though_the_gateway_restarts_at_the_end(tmp_path: Path) -> None:
    tries = []

    class Restarting(Scenes):
        def call(
            self, method: str, path: str, *, download: Path | None = None, **more: Any
        ) -> ports.ApiResponse:
            if download is None:
                return super().call(method, path, **more)
            tries.append(path)
            if len(tries) == 1:
                download.write_bytes(b"half")
                raise command_line.Unanswered("restarts")
            download.write_bytes(b"whole")
            return ports.ApiResponse(200, None, b"")

    unpublished = dataclasses.replace(
        scene(model.State.COMPLETED, 4), output_path="", error_path=""
    )
    err = io.StringIO()
    code = waiting.until_done(
        7, api=Restarting(unpublished), err=err, pause=lambda _: None, folder=tmp_path
    )
    assert (code, len(tries)) == (0, 2)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("fbatch-7.jsonl", b"whole")
    ]
    assert "job 7: restarts; waiting, a minute at most\njob 7: the gateway answers again\n" in (
        err.getvalue()
    )


def test_a_minute_is_a_minute_though_each_try_takes_half_of_it() -> None:
    now, tries = [0.0], 0

    def ask() -> None:
        nonlocal tries
        tries += 1
        now[0] += 29.5
        raise command_line.Unanswered("no answer in 29 s")

    with pytest.raises(command_line.Unanswered):
        command_line.patiently(ask, lambda _: None, lambda: now[0])
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
