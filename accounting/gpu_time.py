"""GPU-seconds by lease, from the agents' own clocks, and beside them what Slurm's accounting says.

Forebay's figure never comes from Slurm: only so does the comparison mean anything. All runs of a requeued
job count, on both sides (`sacct -D`).
"""

import dataclasses
from collections.abc import Iterable

from scheduler.contracts import ids, slurm, usage

SHARE_ALLOWED = 50  # one part in 50: 2 %
# Ends of a job from outside: sacct's End is the moment of the order, not of the last process.
_TOLD_TO_END = frozenset(
    {
        slurm.JobState.CANCELLED,
        slurm.JobState.PREEMPTED,
        slurm.JobState.TIMEOUT,
        slurm.JobState.DEADLINE,
    }
)
_SECOND_US = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseTime:
    """What a lease held.

    Attributes:
        gpus: the most that any row says.
        runs: runs of the Slurm job that left rows.
        gpu_us: GPU-µs over all runs.
        first_us, last_us: from the first row's begin to the last row's end.
        backwards: rows that end before they begin; they count nothing.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One lease in both books.

    Attributes:
        sacct_us: GPU-µs by `sacct -D`, None where it can't say.
        allowed_us: how far apart they may be: 2 % or one second for each GPU, the larger.
        late_us: GPU-µs of `forebay_us` after Slurm had stopped its count. It does so when it tells a
            job to end; the GPUs are held until the job has left. Added to Slurm's figure to compare.
        agrees: None where there is nothing to compare, or the job still runs.
        note: why not, or "".
    """

    lease_id: str
    slurm_job_id: str
    gpus: int
    forebay_us: int
    sacct_us: int | None = None
    allowed_us: int = 0
    late_us: int = 0
    agrees: bool | None = None
    note: str = ""


def tiled(rows: Iterable[usage.GpuRow]) -> list[usage.GpuRow]:
    """Return rows that tile each run: every (lease, run, seq) once, and no moment of a run twice.

    A row that ends before it begins is kept as it is; it counts nothing.
    """
    longest: dict[tuple[str, str, int, int], usage.GpuRow] = {}
    for row in rows:
        key = (row.cluster, row.lease_id, row.run, row.seq)
        other = longest.get(key)
        if other is None or row.end_us > other.end_us:
            longest[key] = row
    until: dict[tuple[str, str, int], int] = {}
    found = []
    for row in sorted(longest.values(), key=lambda each: (each.start_us, each.seq)):
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
    return LeaseTime(
        lease_id=newest.lease_id,
        cluster=newest.cluster,
        slurm_job_id=newest.slurm_job_id,
        team=newest.team,
        kind=newest.kind,
        gpus=max(row.gpus for row in rows),
        runs=len({row.run for row in rows}),
        gpu_us=sum(row.gpus * max(0, row.end_us - row.start_us) for row in rows),
        first_us=min(row.start_us for row in rows),
        last_us=max(row.end_us for row in rows),
        backwards=sum(row.end_us < row.start_us for row in rows),
    )


def reconcile(port: slurm.SlurmPort, leases: Iterable[LeaseTime]) -> list[Compared]:
    """Put Slurm's figure beside ours, lease by lease. Blocks: one call to Slurm for each lease.

    Slurm without accounting, or one that does not answer, leaves a lease unreconciled and is no error;
    after the first such answer the others are not asked.
    """
    answers: list[Compared] = []
    off = ""
    for lease in leases:
        ours = Compared(lease.lease_id, lease.slurm_job_id, lease.gpus, lease.gpu_us)
        if off:
            answers.append(dataclasses.replace(ours, note=off))
            continue
        try:
            runs = port.accounting(ids.SlurmJobId(lease.slurm_job_id))
        except slurm.SlurmError as error:
            note = f"unreconciled: {' '.join(str(error).split())}"
            if isinstance(error, slurm.AccountingOff | slurm.SlurmUnavailable):
                off = note
            answers.append(dataclasses.replace(ours, note=note))
        else:
            answers.append(compare(ours, runs, lease.last_us))
    return answers


def compare(ours: Compared, runs: Iterable[slurm.JobRun], last_us: int) -> Compared:
    """Return the comparison of one lease with the runs that Slurm recorded for its job.

    Args:
        ours: our side.
        runs: Slurm's.
        last_us: until when our side counts, UTC µs.
    """
    known = list(runs)
    total, silent = 0, 0
    for run in known:
        if run.gpus is None:
            silent += 1
        else:
            total += run.gpus * run.elapsed_s * _SECOND_US
    if not known or silent:
        why = "Slurm has no record of the job" if not known else "AllocTRES has no GPUs"
        return dataclasses.replace(ours, note=f"unreconciled: {why}")
    allowed = max(total // SHARE_ALLOWED, ours.gpus * _SECOND_US)
    running = any(run.ended_us == 0 for run in known)
    last = max(known, key=lambda run: run.ended_us)
    late = 0
    if not running and last.state in _TOLD_TO_END:
        late = ours.gpus * max(0, last_us - last.ended_us)
    note = f"held {late / ours.gpus / _SECOND_US:.1f} s after Slurm ended it" if late else ""
    return dataclasses.replace(
        ours,
        sacct_us=total,
        allowed_us=allowed,
        late_us=late,
        agrees=None if running else abs(total + late - ours.forebay_us) <= allowed,
        note="still running" if running else note,
    )
