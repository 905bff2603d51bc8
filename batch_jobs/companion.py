"""``fbatch --companion``: a small Slurm job that ends as a batch job does, for other Slurm jobs to wait for.

It is the user's own: submitted with their sbatch, in their name. It holds a core and no GPU, waits by
``fqueue --wait``, and succeeds only if every line did, so that ``sbatch --dependency=afterok:…`` means what
it says. Where its partition has a time limit, it is put back into the queue before that strikes, and waits
on. Pure.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence

LEAVE_S = (
    120  # so long before its time limit it goes back into the queue; Slurm may be a minute late
)
_AGAIN_S = 30  # after a gateway that did not answer
# Where a user's jobs run and who pays; Slurm may refuse a job without.
_THEIRS = frozenset(
    f"SBATCH_{name}"
    for name in (
        *("ACCOUNT", "CLUSTERS", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION"),
        *("TIMELIMIT", "WCKEY"),
    )
)

Submit = Callable[[Sequence[int]], str]
"""Submits the companion of these batch jobs by the user's sbatch, returns its id; raises CommandError."""


def surroundings(env: Mapping[str, str]) -> dict[str, str]:
    """Return a user's environment without what their SBATCH_… asks of other jobs: GPUs, nodes, an array."""
    return {
        name: text
        for name, text in env.items()
        if not name.startswith("SBATCH_") or name in _THEIRS
    }


def arguments(job_ids: Sequence[int]) -> list[str]:
    """Return sbatch's arguments; on its command line they go before the user's SBATCH_…."""
    name = f"fbatch-{job_ids[0]}"
    return [
        f"--job-name={name}",
        f"--comment=waits for batch job {job_ids[0]} of Forebay",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--mem=256M",
        "--gres=none",
        "--requeue",
        "--export=ALL",  # by it fqueue finds the gateway and the key
        f"--signal=B:USR1@{LEAVE_S}",
        f"--output={name}-slurm-%j.out",
        "--open-mode=append",
    ]


def script(job_ids: Sequence[int], fqueue: str, unanswered: int) -> str:
    """Return the job's script.

    Args:
        job_ids: the batch job, or an array's tasks.
        fqueue: path of the command.
        unanswered: the exit code by which it says that the gateway did not answer: ask again.
    """
    ids = ",".join(map(str, job_ids))
    return f"""\
#!/bin/sh
# Waits for Forebay's batch job {job_ids[0]}; ends as it does.
leave() {{
  kill "$waiter"
  scontrol requeue "$SLURM_JOB_ID" || exit 1
  sleep {LEAVE_S}  # Slurm ends this run
}}
trap leave USR1
while :; do
  {shlex.quote(fqueue)} --wait --jobs={ids} &
  waiter=$!
  wait "$waiter"
  code=$?
  [ "$code" -eq {unanswered} ] || exit "$code"
  sleep {_AGAIN_S} &
  waiter=$!
  wait "$waiter"
done
"""
