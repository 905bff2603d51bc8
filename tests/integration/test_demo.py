"""`make demo` itself: real vLLM on real Slurm, on the embedded one, and broken off half-way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import realslurm, services

_ENGINES = sorted(Path(sys.prefix).parent.glob(".venv-vllm-*"))
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def _start(folder: Path, **env: str) -> "subprocess.Popen[str]":
    services.require(bool(_ENGINES), "an engine environment (.ci/setup demo)")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "forebay", "demo"],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(folder: Path, **env: str) -> dict[str, Any]:
    with _start(folder, **env) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "Traceback" not in said
    _assert_gone(folder)
    found: dict[str, Any] = json.loads((folder / "build" / "demo.json").read_text())
    return found


def _assert_gone(folder: Path) -> None:
    """Nothing that the demo started may be left: its processes name its folder somewhere."""
    mark = os.fsencode(folder)
    left = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if mark in words:
            left.append(words[:200])
    assert left == []


def _assert_kept(found: dict[str, Any]) -> None:
    assert found["batch"]["lines"] == found["batch"]["done"] == 200
    assert (found["batch"]["lost"], found["batch"]["duplicated"]) == (0, 0)
    assert found["batch"]["preempted"] > 0
    assert found["interactive"]["sent"] == found["interactive"]["answered"] > 0
    assert found["reclaim_s"]["max"] < 5
    assert found["engine"]["name"] == "vllm"
    assert set(found["ttft_ms"]) == {"before", "during", "after"}


@pytest.mark.slurm
@pytest.mark.alone
def test_the_demo_keeps_its_promises_on_real_slurm(tmp_path: Path) -> None:
    realslurm.require_slurm()
    found = _run(tmp_path)
    _assert_kept(found)
    assert found["slurm"]["kind"] == "devcluster"
    seconds = found["gpu_seconds"]
    assert seconds["forebay"] > 0
    # The demo has compared each lease; here the sum of three leases of four GPUs.
    assert abs(seconds["forebay"] - seconds["sacct"]) <= max(0.02 * seconds["sacct"], 12)


@pytest.mark.alone
def test_the_demo_keeps_its_promises_without_slurm(tmp_path: Path) -> None:
    found = _run(tmp_path, SLURM="embedded")
    _assert_kept(found)
    assert found["slurm"]["kind"] == "embedded"


@pytest.mark.slurm
def test_a_demo_broken_off_leaves_nothing(tmp_path: Path) -> None:
    realslurm.require_slurm()
    with _start(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "broker: asks Slurm" in line:
                process.send_signal(signal.SIGINT)
                break
        said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    _assert_gone(tmp_path)
