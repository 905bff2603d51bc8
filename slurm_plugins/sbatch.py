"""Renders what is handed to Slurm: sbatch's arguments, a lease's batch script, steps' srun lines. Pure.

Arguments go to the commands as a list, never through a shell; what becomes script text is quoted.
"""

import math
import shlex
from collections.abc import Mapping, Sequence

from scheduler.contracts import slurm
from slurm_plugins import hostlist, stamp, tres

# A job gets this unless its environment says otherwise; the submitter's own is never passed on.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def minutes(seconds: float) -> int:
    """Return whole minutes, rounded up: Slurm knows time limits in minutes only."""
    return max(1, math.ceil(seconds / 60))


def environment(spec: slurm.JobSpec) -> dict[str, str]:
    """Return the whole environment of a job: what its spec gives, and a PATH if that has none."""
    return {"PATH": DEFAULT_PATH, **spec.environment}


def check(spec: slurm.JobSpec) -> None:
    """Refuse a spec that Slurm would misread.

    Raises:
        slurm.SlurmRefused: a value that is empty where one is needed or can't be passed on.
    """
    if not spec.script.startswith("#!"):
        raise slurm.SlurmRefused(f"job {spec.name!r}: the script must start with #! and a shell")
    if not spec.partitions or spec.nodes < 1 or spec.time_limit_s < 1:
        raise slurm.SlurmRefused(
            f"job {spec.name!r}: partition, nodes ≥ 1 and a time limit are needed"
        )
    texts = (
        spec.name, spec.output, spec.directory, spec.account, spec.qos, spec.constraint,
        *spec.partitions, *spec.environment, *spec.environment.values(),
    )  # fmt: skip
    if any("\0" in text for text in texts):
        raise slurm.SlurmRefused(f"job {spec.name!r}: a value holds a NUL byte")


def arguments(spec: slurm.JobSpec) -> list[str]:
    """Return sbatch's options for a job; the script itself goes to its standard input.

    The environment is not among them: sbatch is started with `environment(spec)` and little else, and
    ``--export=ALL`` passes on exactly that. A list in ``--export`` would make slurmd run the user's
    login shell on the node and add what it finds there, and can't carry a value that holds a comma.
    """
    check(spec)
    options = {
        "job-name": spec.name,
        "partition": ",".join(spec.partitions),
        "time": str(minutes(spec.time_limit_s)),
        "output": spec.output,
        "chdir": spec.directory,
        "comment": stamp.render(spec.stamp) if spec.stamp is not None else "",
        "account": spec.account,
        "qos": spec.qos,
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cpus_per_node),
        "gres": tres.request(spec.gpus_per_node, spec.gres_type, spec.gres)
        if spec.gpus_per_node
        else "",
        "mem": "" if spec.memory_mb is None else str(spec.memory_mb),
        "time-min": str(minutes(spec.time_min_s)) if spec.time_min_s else "",
        "constraint": spec.constraint,
        "nodelist": hostlist.compress(spec.nodelist),
        "exclude": hostlist.compress(spec.exclude),
    }
    rendered = [f"--{name}={value}" for name, value in options.items() if value]
    held = ["--hold"] if spec.hold else []
    return ["--parsable", "--no-requeue", "--export=ALL", *rendered, *held]


def job_text(spec: slurm.JobSpec) -> str:
    """Return a job as a script that could be given to sbatch by hand, with its options on top."""
    first, _, rest = spec.script.partition("\n")
    options = [f"#SBATCH {shlex.quote(option)}" for option in arguments(spec)]
    return "\n".join([first, *options, rest])


def lease_script(
    *,
    python: str,
    spec_file: str,
    prolog: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return a lease's batch script: note the start, run the site's lines, become the agent.

    `exec` matters: Slurm signals the batch shell alone in some cases, and the agent is then the one
    that hears it. `-P` matters: Slurm starts a job in the user's folder, which must not shadow modules.

    Args:
        python: path of the interpreter in Forebay's environment.
        spec_file: path of the agent's spec.
        prolog: lines of shell from the site's own settings (`module load cuda`), taken as they are.
        environment: variables to set for the agent.
    """
    for line in prolog:
        if "\n" in line:
            raise ValueError(f"script prolog: {line!r} holds a line break; give a line each")
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in sorted((environment or {}).items())
    ]
    lines = [
        "#!/bin/bash",
        # EPOCHREALTIME came with bash 5; the sub-shell serves older ones.
        'FOREBAY_LEASE_STARTED_US="${EPOCHREALTIME:-$(date +%s.%6N)}"',
        'export FOREBAY_LEASE_STARTED_US="${FOREBAY_LEASE_STARTED_US/[.,]/}"',
        *exports,
        *prolog,
        f"exec {shlex.quote(python)} -P -m forebay agent --spec {shlex.quote(spec_file)}",
    ]
    return "\n".join(lines) + "\n"


def srun_arguments(
    job_id: str,
    *,
    gpus: int,
    cpus: int,
    gres_type: str = "",
    gres: str = "gpu",
    extra: Sequence[str] = (),
    node: int | None = None,
) -> list[str]:
    """Return srun's options for one task that holds GPUs which no other step of the job has.

    ``--exact`` with ``--mem=0`` gives concurrent steps their own GPUs without blocking on memory;
    ``--overlap`` would give all of them the same ones.
    ``node`` counts the job's nodes from 0; None lets Slurm choose one that has the GPUs.
    """
    return [
        f"--jobid={job_id}",
        "--exact",
        "--nodes=1",
        *([] if node is None else [f"--relative={node}"]),
        "--ntasks=1",
        f"--cpus-per-task={max(1, cpus)}",
        f"--gres={tres.request(gpus, gres_type, gres)}" if gpus else "--gres=none",
        "--mem=0",
        "--input=none",
        "--unbuffered",
        "--export=ALL",
        *extra,
    ]
