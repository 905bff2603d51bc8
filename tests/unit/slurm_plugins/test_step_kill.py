"""A step is ended for good though nobody ever tells its srun: its slurmstepd was killed, or Slurm is away."""

import asyncio
from pathlib import Path

import pytest

from slurm_plugins import children, steps


@pytest.mark.parametrize("scancel", ["exit 0", "echo 'Unable to contact slurm controller'; exit 1"])
async def test_an_srun_that_hears_nothing_is_killed_with_its_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scancel: str
) -> None:
    (tmp_path / "scancel").write_text(f"#!/bin/sh\n{scancel}\n")
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(steps, "KILLED_S", 0.2)
    deaf = "trap '' TERM; sleep 60 & echo $!; wait; wait"
    log = tmp_path / "srun.log"
    process = children.spawn(["/bin/sh", "-c", deaf], env={"PATH": "/bin:/usr/bin"}, log=log)
    step = steps.SrunStep(process, "7.0")
    while not log.read_text().strip():
        assert process.poll() is None
    await step.kill()
    assert await step.wait() == -9
    stat = Path(f"/proc/{log.read_text().split()[0]}/stat")
    async with asyncio.timeout(10):  # it is killed, and dies when it gets a core
        while not _gone(stat):  # noqa: ASYNC110 - a process that dies rings no bell
            await asyncio.sleep(0.01)


def _gone(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
