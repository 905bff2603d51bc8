"""Short commands beside live gRPC channels, and who is chosen to reach Slurm."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.contracts import slurm
from slurm_plugins import children, embedded, pyslurm_client, select, settings, steps


async def test_output_codes_and_limits_of_a_command() -> None:
    done = await children.run(["/bin/sh", "-c", "echo out; echo err >&2; printf '\\351'; exit 3"])
    assert (done.code, done.output) == (3, "out\nerr\n\\xe9")
    with pytest.raises(TimeoutError):
        await children.run(["/bin/sleep", "60"], timeout_s=0.05)
    with pytest.raises(FileNotFoundError):
        await children.run(["/no/such/command"])


async def test_many_may_wait_for_one_process(tmp_path: Path) -> None:
    process = children.spawn(["/bin/sleep", "0.05"], env={}, log=tmp_path / "log")
    assert await asyncio.gather(*(children.wait(process) for _ in range(3))) == [0, 0, 0]
    assert await children.wait(process) == 0


async def test_without_pidfd_a_thread_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = children.spawn(
        [sys.executable, "-c", "raise SystemExit(4)"], env={}, log=tmp_path / "l"
    )
    assert await children.wait(process) == 4


def test_the_tail_of_a_log_is_one_line_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old trouble\n")
    since = log.stat().st_size
    log.write_text("old trouble\nnew\n  words\n")
    assert children.tail(log, since=since) == "new words"
    assert children.tail(tmp_path / "none") == ""


def test_a_lease_outside_slurm_has_no_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert isinstance(steps.for_lease(steps.Wanted("embedded")), steps.LocalLauncher)
    with pytest.raises(slurm.SlurmRefused, match="SLURM_JOB_ID"):
        steps.for_lease(steps.Wanted("cli"))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert isinstance(steps.for_lease(steps.Wanted("cli")), steps.SrunLauncher)


def _no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))


def test_without_slurm_the_embedded_one_is_chosen_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_slurm(monkeypatch, tmp_path)
    choice = select.connect(settings.SlurmSettings(), tmp_path)
    assert isinstance(choice.port, embedded.EmbeddedClient)
    choice.port.shutdown()
    for name in ("pyslurm", "slurmrestd", "cli"):
        assert f"no {name} (" in choice.reason
    assert choice.reason.startswith("embedded: no Slurm here")


@pytest.mark.parametrize(("controller", "chosen"), [("25.11.4", True), ("26.05.5", False)])
def test_pyslurm_is_preferred_where_its_release_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controller: str, chosen: bool
) -> None:
    _no_slurm(monkeypatch, tmp_path)
    shape = embedded.Shape(nodes=1)
    port = embedded.EmbeddedClient(tmp_path / "stand-in", shape=shape)
    versions = slurm.Versions(client="25.11.2", controller=controller)
    monkeypatch.setattr(port, "versions", lambda: versions)
    monkeypatch.setattr(pyslurm_client, "available", lambda: "")
    monkeypatch.setattr(pyslurm_client, "PyslurmClient", lambda conf, cluster: port)
    choice = select.connect(settings.SlurmSettings(), tmp_path)
    assert (choice.port is port) == chosen
    assert ("25.11.2 is not for Slurm 26.05.5" in choice.reason) == (not chosen)
    port.shutdown()
    if isinstance(choice.port, embedded.EmbeddedClient):
        choice.port.shutdown()


def test_a_client_asked_for_by_name_must_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_slurm(monkeypatch, tmp_path)
    with pytest.raises(slurm.SlurmUnavailable, match="sbatch"):
        select.connect(settings.SlurmSettings(client="cli"), tmp_path)
    with pytest.raises(slurm.SlurmUnavailable, match="rest_url"):
        select.connect(settings.SlurmSettings(client="slurmrestd"), tmp_path)
    with pytest.raises(slurm.SlurmRefused, match="give auto"):
        select.connect(settings.SlurmSettings(client="magic"), tmp_path)
    url = "http://127.0.0.1:1"
    with pytest.raises(slurm.SlurmRefused, match="jwt_key_file"):
        select.connect(settings.SlurmSettings(client="slurmrestd", rest_url=url), tmp_path)


def test_slurms_commands_are_chosen_where_they_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_slurm(monkeypatch, tmp_path)
    for name, text in (
        ("sbatch", ""),
        ("squeue", "echo 'slurm 22.05.8'"),
        ("scontrol", "echo 'ClusterName = alpha'; echo 'SLURM_VERSION = 22.05.8'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert subprocess.run([tmp_path / "squeue"], check=True, capture_output=True).stdout
    choice = select.connect(settings.SlurmSettings(), tmp_path)
    assert (choice.port.kind, choice.port.cluster) == ("cli", "alpha")
    assert "Slurm 22.05.8" in choice.reason
