"""The user's own sbatch, for ``fbatch --companion``."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from batch_jobs import companion
from scheduler.contracts import command_line
from slurm_plugins import parse_submit

_LIMIT_S = 120.0


def submit(job_ids: Sequence[int], env: Mapping[str, str]) -> str:
    """Submit the companion of a batch job, or of an array's tasks; returns Slurm's id of it.

    Args:
        job_ids: the batch jobs.
        env: the user's environment, in which sbatch finds its settings and the companion its gateway.

    Raises:
        command_line.CommandError: Slurm refused, or isn't here.
    """
    text = companion.script(job_ids, _fqueue(env), command_line.UNANSWERED)
    argv = ["sbatch", "--parsable", *companion.arguments(job_ids)]
    try:
        done = subprocess.run(
            argv,
            input=text,
            env=companion.surroundings(env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise command_line.CommandError(
            "--companion: there is no sbatch here: submit from a host of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise command_line.CommandError(
            f"--companion: sbatch gave no answer in {_LIMIT_S:g} s: look for "
            f"fbatch-{job_ids[0]} in squeue"
        ) from None
    answer = None if done.returncode else parse_submit.parse(done.stdout, cluster="")
    if answer is None:
        words = " ".join((done.stderr or done.stdout).split())[-400:]
        raise command_line.CommandError(f"--companion: {words or 'sbatch said nothing'}")
    return str(answer.job_id)


def _fqueue(env: Mapping[str, str]) -> str:
    """Return where fqueue is: beside this command, else on the PATH."""
    beside = Path(sys.argv[0]).absolute().with_name("fqueue")
    found = str(beside) if beside.is_file() else shutil.which("fqueue", path=env.get("PATH"))
    if found is None:
        raise command_line.CommandError("--companion: fqueue is not on the PATH")
    return found
