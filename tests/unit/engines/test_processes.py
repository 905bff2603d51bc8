"""Parent death, marks in the environment, private files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engines import private, processes

ROOT = str(Path(__file__).parents[3])


def run(code: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_bound_child_dies_with_its_parent() -> None:
    child = "from engines import processes; processes.die_with_parent(); print('up', flush=True); input()"
    parent = run(
        "import subprocess, sys\n"
        f"c = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE,"
        " stdout=subprocess.PIPE, text=True)\n"
        "c.stdout.readline(); print(c.pid, flush=True); input()"
    )
    pid = int(line(parent))
    handle = os.pidfd_open(pid)
    parent.kill()
    parent.communicate()
    import select

    assert select.select([handle], [], [], 5.0)[0], "the child outlived its parent"
    os.close(handle)
    assert not processes.alive(pid)


def test_a_child_whose_parent_is_gone_already_leaves() -> None:
    late = run("from engines import processes; processes.die_with_parent(1); print('alive')")
    assert late.communicate()[0] == ""
    assert late.returncode == 1


def test_marked_processes_are_found_and_killed_and_we_are_spared() -> None:
    code = "print('up', flush=True); input()"
    one = run(code, FOREBAY_TEST_MARK="a", FOREBAY_TEST_OTHER="x")
    two = run(code, FOREBAY_TEST_MARK="a", FOREBAY_TEST_OTHER="y")
    three = run(code, FOREBAY_TEST_MARK="ab")
    try:
        for process in (one, two, three):
            assert line(process) == "up"
        assert set(processes.marked({"FOREBAY_TEST_MARK": "a"})) == {one.pid, two.pid}
        spared = processes.kill_marked({"FOREBAY_TEST_MARK": "a"}, frozenset({two.pid}))
        assert spared == [one.pid]
        assert one.wait(30) == -signal.SIGKILL
        assert processes.environment(two.pid)["FOREBAY_TEST_OTHER"] == "y"
        assert two.poll() is None
        assert three.poll() is None
    finally:
        for process in (one, two, three):
            process.kill()
            process.communicate()
    assert os.getpid() in processes.ancestors()
    with pytest.raises(ValueError, match="no marks"):
        processes.kill_marked({})


def test_a_pid_is_one_process_only_with_its_start() -> None:
    me = os.getpid()
    assert processes.alive(me, processes.start_time(me))
    assert not processes.alive(me, 1)
    assert not processes.alive(2**22 + 1)
    assert processes.environment(2**22 + 1) == {}
    processes.kill(2**22 + 1)
    processes.kill_group(2**22 + 1)
    with pytest.raises(ValueError, match="not a group of ours"):
        processes.kill_group(1)


def test_private_files(tmp_path: Path) -> None:
    folder = private.folder(tmp_path / "run")
    assert folder.stat().st_mode & 0o777 == 0o700
    secret = private.new_secret(folder / "s")
    assert (folder / "s").stat().st_mode & 0o777 == 0o600
    assert private.read(folder / "s") == secret
    assert len(secret) >= 40
    (folder / "s").chmod(0o640)
    with pytest.raises(private.PrivateFileError, match="chmod 600"):
        private.read(folder / "s")
    private.write(folder / "e", "\n")
    with pytest.raises(private.PrivateFileError, match="empty"):
        private.read(folder / "e")
    with pytest.raises(private.PrivateFileError, match="No such file"):
        private.read(folder / "none")
