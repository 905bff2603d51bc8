"""What sbatch printed, to a job id and a cluster. Pure.

Sites wrap sbatch and print notices before its answer, so the answer is looked for and not taken by
its place; what can't be read is None, and the caller then looks for the job's stamp.
"""

import re

from scheduler.contracts import ids, slurm

_PARSABLE = re.compile(r"(\d+)(?:;([\w.-]+))?")
_PROSE = re.compile(r"(?:sbatch: )?Submitted batch job (\d+)(?: on cluster ([\w.-]+))?\.?")


def parse(stdout: str, *, cluster: str) -> slurm.Submitted | None:
    """Find the job id in sbatch's output.

    Args:
        stdout: all that it printed.
        cluster: the cluster where the answer names none.

    Returns:
        None if there is no line that is an answer and nothing else.
    """
    for line in reversed(stdout.splitlines()):
        text = line.strip()
        match = _PARSABLE.fullmatch(text) or _PROSE.fullmatch(text)
        if match is not None:
            return slurm.Submitted(ids.SlurmJobId(match[1]), match[2] or cluster)
    return None
