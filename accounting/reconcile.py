"""Leases in Forebay's and in Slurm's books: what `sacct -D` says of each job, and whether the two agree.

All runs of a requeued job count, on both sides. Two differences are known of each run, added to Slurm's
figure before it is judged, and told: the time between Slurm's start of the run and the first line of its
script (launch, the site's prolog), and the time in which a run that was told to end still held its GPUs.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from accounting import books, gpu_time, manifest, reports
from scheduler.contracts import ids, slurm

SHARE_ALLOWED = 100  # one part in 100: 1 %
LAUNCH_AT_MOST_S = 30  # a later first row is no launch, but rows that are missing
# Ends of a job from outside: sacct's End is the moment of the order, not of the last process.
_TOLD_TO_END = frozenset(
    {
        slurm.JobState.CANCELLED,
        slurm.JobState.PREEMPTED,
        slurm.JobState.TIMEOUT,
        slurm.JobState.DEADLINE,
        slurm.JobState.PENDING,  # a run that was requeued
    }
)
_SECOND_US = 1_000_000
_DAY_US = 86_400_000_000
_ALL, _EVERY = reports.Scope(), reports.Filter()


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One lease in both books.

    Attributes:
        sacct_us: GPU-µs by `sacct -D`, None where it can't say.
        allowed_us: how far apart they may be: 1 % or one second for each GPU, the larger.
        late_us: GPU-µs of `forebay_us` after Slurm had stopped its count. It does so when it tells a
            job to end; the GPUs are held until the job has left. Added to Slurm's figure to compare.
        early_us: GPU-µs that Slurm counts before the script's first line. Taken off Slurm's figure to
            compare.
        lost_us: GPU-µs of `forebay_us` that are Slurm's word: its node had died, nobody there could count.
        parts: of a GPU that Slurm counts for it; 1: whole ones.
        units: of them that the lease holds.
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
    early_us: int = 0
    lost_us: int = 0
    parts: int = 1
    units: int = 0
    agrees: bool | None = None
    note: str = ""


def of_window(
    records: books.Books, port: slurm.SlurmPort, first_us: int, last_us: int
) -> list[Compared]:
    """Compare every lease that held anything in a window, over its whole life. Blocks."""
    with records.reading(first_us, last_us) as reading:
        names = {lease.lease_id for lease in reports.lease_times(reading, _ALL, _EVERY)}
    with records.reading() as reading:
        wanted = dataclasses.replace(_EVERY, jobs=tuple(names))
        leases = reports.lease_times(reading, _ALL, wanted) if names else []
    return reconcile(port, leases)


def nightly(
    records: books.Books, port: slurm.SlurmPort, midnight_us: int, folder: Path
) -> list[str]:
    """Compare the leases of the two days before a midnight and keep what was found. Blocks.

    Two days, so that a lease which still ran last night is judged when it has ended. The answer lies in
    ``folder`` as ``reconciled.json``, swapped whole.

    Returns:
        One line for each lease that is apart.
    """
    found = of_window(records, port, midnight_us - 2 * _DAY_US, midnight_us)
    folder.mkdir(parents=True, exist_ok=True)
    said = {"until_us": midnight_us, "leases": [dataclasses.asdict(each) for each in found]}
    manifest.write_durably(folder / "reconciled.json", json.dumps(said).encode())
    return [
        f"lease {each.lease_id} (job {each.slurm_job_id}): Forebay counted "
        f"{each.forebay_us / _SECOND_US:.1f} GPU-seconds, sacct {(each.sacct_us or 0) / _SECOND_US:.0f}, "
        f"allowed {each.allowed_us / _SECOND_US:.1f}: see freport reconcile"
        for each in found
        if each.agrees is False
    ]


def reconcile(port: slurm.SlurmPort, leases: Iterable[gpu_time.LeaseTime]) -> list[Compared]:
    """Put Slurm's figure beside ours, lease by lease. Blocks: one call to Slurm for each lease.

    Slurm without accounting, or one that does not answer, leaves a lease unreconciled and is no error;
    after the first such answer the others are not asked.
    """
    answers: list[Compared] = []
    off = ""
    for lease in leases:
        ours = Compared(
            lease.lease_id,
            lease.slurm_job_id,
            lease.gpus,
            lease.gpu_us,
            lost_us=lease.lost_us,
            parts=lease.parts,
            units=lease.units,
        )
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
            answers.append(compare(ours, runs, lease.spans))
    return answers


def compare(
    ours: Compared, runs: Iterable[slurm.JobRun], spans: Sequence[tuple[int, int]]
) -> Compared:
    """Return the comparison of one lease with the runs that Slurm recorded for its job.

    Args:
        ours: our side.
        runs: Slurm's.
        spans: from when to when our side counts each run, UTC µs.
    """
    known = sorted(runs, key=lambda run: (run.started_us, run.run))
    total, silent = 0, 0

    def held(us: int) -> int:
        return ours.units * us // ours.parts

    def seconds(gpu_us: int) -> str:  # for which it held what it holds
        return f"{gpu_us * ours.parts / ours.units / _SECOND_US:.1f} s"

    for run in known:
        units = run.gpus if ours.parts == 1 else next(iter(run.shared.values()), None)
        if units is None:
            silent += 1
        else:
            total += units * run.elapsed_s * _SECOND_US // ours.parts
    if not known or silent:
        why = "Slurm has no record of the job" if not known else _untold(ours.parts)
        return dataclasses.replace(ours, note=f"unreconciled: {why}")
    allowed = max(total // SHARE_ALLOWED, ours.gpus * _SECOND_US)
    running = any(run.ended_us == 0 for run in known)
    # A run that one book lacks has no other beside it: only the first begin and the last end are known then.
    whole = len(known) == len(spans)
    begins = list(zip(known, spans, strict=True)) if whole else [(known[0], spans[0])]
    ends = begins if whole else [(known[-1], spans[-1])]
    late = 0
    if not running:
        told = [(run, span) for run, span in ends if run.state in _TOLD_TO_END]
        late = held(sum(max(0, span[1] - run.ended_us) for run, span in told))
    lags = [span[0] - run.started_us for run, span in begins]
    early = held(sum(lag for lag in lags if 0 < lag <= LAUNCH_AT_MOST_S * _SECOND_US))
    notes = []
    if ours.lost_us:
        notes.append(f"lost with its node or agent: the last {seconds(ours.lost_us)} by Slurm")
    if early > allowed // 2:
        notes.append(f"began {seconds(early)} after Slurm's start")
    if late:
        notes.append(f"held {seconds(late)} after Slurm ended it")
    return dataclasses.replace(
        ours,
        sacct_us=total,
        allowed_us=allowed,
        late_us=late,
        early_us=early,
        agrees=None if running else abs(total + late - early - ours.forebay_us) <= allowed,
        note="still running" if running else "; ".join(notes),
    )


def _untold(parts: int) -> str:
    if parts == 1:
        return "AllocTRES has no GPUs"
    return "AllocTRES has no parts of GPUs: add gres/shard or gres/mps to AccountingStorageTRES"
