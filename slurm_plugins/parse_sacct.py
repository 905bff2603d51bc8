"""Reads ``sacct -D --parsable2`` and sacctmgr's lists. Pure.

Only fields that no user can write are asked for before a name, so that a pipe or a line break in a job's
name shifts nothing.
"""

import dataclasses
import re
from collections.abc import Mapping

from scheduler.contracts import ids, slurm
from slurm_plugins import parse_scontrol, states, tres

FIELDS = ("JobIDRaw", "State", "Start", "End", "ElapsedRaw", "AllocTRES", "NNodes", "ExitCode")
_ARRAY = re.compile(r"(\d+)_(?:(\d+)|\[([\d,:-]+)(?:%\d+)?\])")
MOST_TASKS = 1_000_000


def runs(text: str, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
    """Read every run of one job, oldest first.

    Args:
        text: output of ``sacct -D -X -n --parsable2 --format=FIELDS`` with times in seconds since the
            epoch (`SLURM_TIME_FORMAT=%s`) or in UTC.
        job_id: rows of other jobs are left aside.

    Raises:
        slurm.SlurmGarbled: a row of this job was cut.
    """
    found: list[slurm.JobRun] = []
    for line in text.splitlines():
        cells = line.split("|")
        if cells[0] != job_id:
            continue
        if len(cells) < len(FIELDS):
            raise slurm.SlurmGarbled(f"sacct: a row of job {job_id} was cut: {line[:80]!r}")
        row = dict(zip(FIELDS, cells, strict=False))
        found.append(_run(row, job_id))
    found.sort(key=lambda run: run.started_us or float("inf"))
    return tuple(dataclasses.replace(run, run=number) for number, run in enumerate(found))


def _run(row: Mapping[str, str], job_id: ids.SlurmJobId) -> slurm.JobRun:
    return slurm.JobRun(
        job_id=job_id,
        run=0,
        state=states.job(row["State"]).state,
        started_us=parse_scontrol.point_us(row["Start"]),
        ended_us=parse_scontrol.point_us(row["End"]),
        elapsed_s=int(row["ElapsedRaw"]) if row["ElapsedRaw"].isdecimal() else 0,
        gpus=tres.gpus(row["AllocTRES"]),
        shared=tres.shared(row["AllocTRES"]),
        node_count=int(row["NNodes"]) if row["NNodes"].isdecimal() else 0,
        exit_code=row["ExitCode"],
    )


def array_tasks(job_id: str) -> tuple[str, ...]:
    """Return the tasks that an array's row stands for: ``56_[1-3,7%2]`` is four, ``56_0`` one.

    A form that is not known stands for itself: a pending array must never look finished.
    """
    match = _ARRAY.fullmatch(job_id)
    if match is None or match[3] is None:
        return (job_id,)
    tasks: list[str] = []
    for part in match[3].split(","):
        piece = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", part)
        if piece is None:
            return (job_id,)
        low, high = int(piece[1]), int(piece[2] or piece[1])
        step = int(piece[3] or 1)
        if step < 1 or high - low > MOST_TASKS:
            return (job_id,)
        tasks.extend(f"{match[1]}_{task}" for task in range(low, high + 1, step))
    return tuple(tasks)


def open_tasks(text: str) -> frozenset[str]:
    """Return the array tasks and jobs that are not final, from ``JobID|State`` rows."""
    found: set[str] = set()
    for line in text.splitlines():
        job_id, pipe, state = line.partition("|")
        if pipe and not states.job(state.split("|")[0]).state.final:
            found.update(array_tasks(job_id))
    return frozenset(found)


def associations(
    assoc: str, users: str, coordinators: str, *, cluster: str
) -> tuple[slurm.Association, ...]:
    """Join sacctmgr's three lists.

    Args:
        assoc: ``show assoc format=Cluster,Account,User`` (`-nP`).
        users: ``show user format=User,DefaultAccount,AdminLevel``.
        coordinators: ``show account withcoord format=Account,Coordinators``.
        cluster: rows of other clusters are left aside.
    """
    known = {cells[0]: cells for line in users.splitlines() if len(cells := line.split("|")) >= 3}
    coordinates = {
        cells[0]: frozenset(cells[1].split(","))
        for line in coordinators.splitlines()
        if len(cells := line.split("|")) >= 2
    }
    found: dict[tuple[str, str], slurm.Association] = {}
    for line in assoc.splitlines():
        cells = line.split("|")
        if len(cells) < 3 or cells[0] != cluster:
            continue
        account, user = cells[1], cells[2]
        _, default, level = (known.get(user) or ["", "", ""])[:3]
        found[account, user] = slurm.Association(
            user=user,
            account=account,
            default=bool(user) and default == account,
            coordinator=bool(user) and user in coordinates.get(account, ()),
            admin=level.lower().startswith("admin"),
        )
    return tuple(found.values())
