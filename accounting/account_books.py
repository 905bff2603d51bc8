"""GPU time by Slurm account in three books: Forebay's, sacct's and sreport's, over the same whole hours.

Forebay's leases run under the platform's account, with the team in their stamp; so what Slurm's own reports
say of that account is what Forebay holds, and whatever else was charged to it. The agents' clocks, the jobs'
records and the hourly sums of slurmdbd are three counts of one thing.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from accounting import gpu_time
from scheduler.contracts import ids, slurm

HOUR_US = 3_600_000_000
UNKNOWN = "Unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """One account over whole hours.

    Attributes:
        account: Slurm's name of it; "Unknown" for leases whose job sacct does not know.
        forebay_us: GPU-µs of its leases by the agents' clocks.
        sacct_us: of the same jobs by `sacct -D`, None where it can't say.
        sreport_us: of the whole account by sreport, None where it can't say.
        note: why not, or what a difference may be.
    """

    account: str
    forebay_us: int
    sacct_us: int | None
    sreport_us: int | None
    note: str = ""


def whole_hours(start_us: int, end_us: int) -> tuple[int, int]:
    """Return the whole UTC hours inside a window."""
    return -(-start_us // HOUR_US) * HOUR_US, end_us // HOUR_US * HOUR_US


def compare(
    port: slurm.SlurmPort,
    books: slurm.AccountBooks,
    leases: Iterable[gpu_time.LeaseTime],
    span: tuple[int, int],
) -> list[Account]:
    """Put the three books side by side; blocks. What Slurm does not answer is noted and no error.

    Args:
        port: for sacct's runs.
        books: for sreport, and the jobs' accounts.
        leases: clipped to the span.
        span: whole UTC hours.
    """
    held = [lease for lease in leases if lease.gpu_us]
    note = ""
    accounts: Mapping[ids.SlurmJobId, str] = {}
    told: Mapping[str, int] | None = None
    try:
        accounts = books.accounts(ids.SlurmJobId(lease.slurm_job_id) for lease in held)
        told = books.gpu_seconds(*span)
    except slurm.SlurmError as error:
        note = " ".join(str(error).split())
    ours: dict[str, int] = {}
    sacct: dict[str, int | None] = {}
    for lease in held:
        account = accounts.get(ids.SlurmJobId(lease.slurm_job_id), UNKNOWN)
        ours[account] = ours.get(account, 0) + lease.gpu_us
        theirs, before = _runs(port, lease, span), sacct.get(account, 0)
        sacct[account] = None if theirs is None or before is None else before + theirs
    return [
        _account(name, ours.get(name, 0), sacct.get(name, 0), told, note)
        for name in sorted({*ours, *(told or {})})
        if name in ours or (told or {}).get(name)
    ]


def _account(
    name: str, ours: int, sacct: int | None, told: Mapping[str, int] | None, note: str
) -> Account:
    sreport = None if told is None or name == UNKNOWN else told.get(name, 0) * 1_000_000
    if sacct is None:
        note = note or "sacct has not all of its jobs"
    elif sreport is not None and sreport > max(sacct, ours) + max(sacct // 50, 4_000_000):
        note = "holds other jobs than leases" if ours else "no lease of Forebay's"
    elif sreport is not None and ours > sreport + max(ours // 50, 4_000_000):
        note = "slurmdbd's hourly sums are behind"
    return Account(name, ours, sacct, sreport, note)


def _runs(port: slurm.SlurmPort, lease: gpu_time.LeaseTime, span: tuple[int, int]) -> int | None:
    """Return the GPU-µs of a job's runs within the span."""
    try:
        runs = port.accounting(ids.SlurmJobId(lease.slurm_job_id))
    except slurm.SlurmError:
        return None
    total = 0
    for run in runs:
        if run.gpus is None:
            return None
        end = run.ended_us or run.started_us + run.elapsed_s * 1_000_000
        total += run.gpus * max(0, min(end, span[1]) - max(run.started_us, span[0]))
    return total if runs else None
