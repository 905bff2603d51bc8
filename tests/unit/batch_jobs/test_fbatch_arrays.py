"""fbatch --array: a file for each task or one for all, and tasks that break off."""

from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import ports
from tests.unit.batch_jobs import commanding, world

store = commanding.store  # the fixture
api = commanding.api  # the fixture


def test_an_array_takes_a_file_for_each_task_or_the_same_for_all(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path
) -> None:
    for task in (0, 2):
        commanding.write(tmp_path, f"in-{task}.jsonl", world.many(task + 1))
    said = commanding.fbatch(api, tmp_path, "--array=0-2:2%1", "--parsable", "in-%a.jsonl")
    assert (said.code, said.out) == (0, "1\n")
    assert [(job.shown_id, job.counts.total, job.array_limit) for job in store.list()] == [
        ("1_0", 1, 1),
        ("1_2", 3, 1),
    ]
    script = commanding.write(tmp_path, "job.fb", b"#!/bin/sh\n#FBATCH -a 5-6\n" + world.many(1))
    assert commanding.fbatch(api, tmp_path, script).out == "Submitted batch job 3\n"
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
    commanding.write(tmp_path, "in-0.jsonl", world.many(1))
    said = commanding.fbatch(api, tmp_path, "--array=0-1", "in-%a.jsonl")
    assert said.code == 1
    assert "in-1.jsonl" in said.err
    assert [bool(job.cancel_us) for job in store.list()] == [True]
    assert commanding.fbatch(api, tmp_path, "in-%a.jsonl").code == 255
    assert commanding.fbatch(api, tmp_path, "--array=3-1", "in-0.jsonl").code == 255


@pytest.mark.parametrize("how", ["gone", "interrupted"])
def test_an_array_whose_file_goes_midway_leaves_no_task_behind(
    api: world.AppApi, store: world.TellingStore, tmp_path: Path, how: str
) -> None:
    """Each task's file is read again: by then it may be gone, or whoever waits may have pressed Ctrl-C."""
    name = commanding.write(tmp_path, "requests.jsonl", world.many(1))

    class Midway(world.AppApi):
        def call(self, method: str, path: str, **more: Any) -> ports.ApiResponse:
            if more.get("upload") is not None and len(store.list()) == 2:
                if how == "interrupted":
                    raise KeyboardInterrupt
                (tmp_path / name).unlink()
            return super().call(method, path, **more)

    said = commanding.fbatch(Midway(store, tmp_path / "state"), tmp_path, "--array=0-4", name)
    assert said.code == (130 if how == "interrupted" else 1)
    assert "batch job 1, 2 was cancelled" in said.err
    assert ("requests.jsonl: No such file" in said.err) == (how == "gone")
    assert [bool(job.cancel_us) for job in store.list()] == [True, True]
