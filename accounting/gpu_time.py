"""GPU-seconds by lease, from the agents' own clocks, over all runs of a requeued job.

Forebay's figure never comes from Slurm: only so does the comparison mean anything (`accounting.reconcile`).
"""

import dataclasses
from collections.abc import Iterable

from scheduler.contracts import usage


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseTime:
    """What a lease held.

    Attributes:
        gpus: the most that any row says; those that it has a part of count whole.
        parts: of a GPU that Slurm counts for it; 1: whole ones.
        units: the most of these that any row says.
        runs: runs of the Slurm job that left rows.
        gpu_us: GPU-µs over all runs.
        first_us, last_us: from the first row's begin to the last row's end.
        backwards: rows that end before they begin; they count nothing.
        spans: for each run, in order, the begin of its first row and the end of its last.
        lost_us: GPU-µs of these that the broker wrote, by Slurm's word: its node had died.
    """

    lease_id: str
    cluster: str
    slurm_job_id: str
    team: str
    kind: str
    gpus: int
    runs: int
    gpu_us: int
    first_us: int
    last_us: int
    backwards: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    lost_us: int = 0
    parts: int = 1
    units: int = 0


def tiled(rows: Iterable[usage.GpuRow]) -> list[usage.GpuRow]:
    """Return rows that tile each run: every (lease, run, seq) once, and no moment of a run twice.

    What the broker wrote of a lease that was lost begins where the agent's own rows end. A row that ends
    before it begins is kept as it is; it counts nothing.
    """
    longest: dict[tuple[str, str, int, int], usage.GpuRow] = {}
    for row in rows:
        key = (row.cluster, row.lease_id, row.run, row.seq)
        other = longest.get(key)
        if other is None or row.end_us > other.end_us:
            longest[key] = row
    until: dict[tuple[str, str, int], int] = {}
    found = []
    for row in sorted(longest.values(), key=lambda each: (each.lost, each.start_us, each.seq)):
        run = row.cluster, row.lease_id, row.run
        if row.end_us < row.start_us:
            found.append(row)
            continue
        start = min(max(row.start_us, until.get(run, 0)), row.end_us)
        until[run] = max(until.get(run, 0), row.end_us)
        found.append(dataclasses.replace(row, start_us=start))
    return found


def by_lease(rows: Iterable[usage.GpuRow]) -> list[LeaseTime]:
    """Sum the rows of each lease over all its runs."""
    leases: dict[tuple[str, str], list[usage.GpuRow]] = {}
    for row in tiled(rows):
        leases.setdefault((row.cluster, row.lease_id), []).append(row)
    return [_total(group) for _, group in sorted(leases.items())]


def _total(rows: list[usage.GpuRow]) -> LeaseTime:
    newest = max(rows, key=lambda row: (row.run, row.seq))
    runs: dict[int, list[usage.GpuRow]] = {}
    for row in sorted(rows, key=lambda row: row.run):
        runs.setdefault(row.run, []).append(row)
    return LeaseTime(
        lease_id=newest.lease_id,
        cluster=newest.cluster,
        slurm_job_id=newest.slurm_job_id,
        team=newest.team,
        kind=newest.kind,
        gpus=max(-(-row.gpus // max(1, row.parts)) for row in rows),
        parts=max(row.parts for row in rows),
        units=max(row.gpus for row in rows),
        runs=len(runs),
        gpu_us=sum(row.gpu_us for row in rows),
        first_us=min(row.start_us for row in rows),
        last_us=max(row.end_us for row in rows),
        backwards=sum(row.end_us < row.start_us for row in rows),
        lost_us=sum(row.gpu_us for row in rows if row.lost),
        spans=tuple(
            (min(row.start_us for row in run), max(row.end_us for row in run))
            for run in runs.values()
        ),
    )
