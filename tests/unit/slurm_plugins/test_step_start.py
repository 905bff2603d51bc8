"""A step says by its output that it has started: a file of another node's may be seen much later."""

from pathlib import Path

import pytest

from scheduler.contracts import slurm
from slurm_plugins import steps

SRUN = """#!/bin/sh
echo 'srun: job 7 queued' >&2
while [ "${1#-}" != "$1" ]; do shift; done
%s
export SLURM_JOB_ID=7 SLURM_STEP_ID=3
exec "$@"
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> steps.SrunLauncher:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return steps.SrunLauncher("7", start_timeout_s=10.0)


def play(tmp_path: Path, does: str) -> None:
    (tmp_path / "srun").write_text(SRUN % does)
    (tmp_path / "srun").chmod(0o755)


async def test_a_step_has_started_once_its_output_says_so(
    tmp_path: Path, launcher: steps.SrunLauncher
) -> None:
    play(tmp_path, "")
    log = tmp_path / "log"
    log.write_text("forebay-step.1.1 9.9\nof the slot's step before\n")
    argv = ["/bin/sh", "-c", "echo done; exit 4"]
    step = await launcher.start(argv, gpus=0, cpus=1, env={}, log=log)
    assert step.step_id == "7.3"
    assert await step.wait() == 4
    assert log.read_text().endswith("7.3\ndone\n")
    assert {path.name for path in tmp_path.iterdir()} == {"srun", "log"}, (
        "and nothing is left of it"
    )


async def test_a_step_that_never_starts_says_why(
    tmp_path: Path, launcher: steps.SrunLauncher
) -> None:
    play(tmp_path, "echo 'srun: error: no such partition' >&2; exit 1")
    with pytest.raises(
        slurm.SlurmRefused, match=r"ended with 1 before the step started: .*no such"
    ):
        await launcher.start(["true"], gpus=0, cpus=1, env={}, log=tmp_path / "log")
