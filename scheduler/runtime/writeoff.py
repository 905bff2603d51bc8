"""The last GPU time of a lease whose node or agent died: nobody there could write it, and Slurm counted it.

The leader writes it when the lease ends, until the moment that Slurm states, as one row that says so
(`usage.GpuRow.lost`). Its beginning reaches back over what the agent has told: readers let it begin where the
agent's own rows end, so no moment counts twice, and what the agent counted stays the agent's.
"""

import logging
from collections.abc import Awaitable, Callable

from scheduler.contracts import clock, fleet, slurm, usage
from scheduler.runtime import entries

log = logging.getLogger(__name__)
WriteOff = Callable[[usage.GpuRow], Awaitable[None]]
SEQ = 1_000_000_000  # no agent writes so many rows
BEFORE_US = (
    600_000_000  # a node that lost its power lost a minute of rows that its disk had not written
)
UNHEARD_US = 12 * 3_600_000_000  # where this leader never heard the agent: rows of a day at most


async def nowhere(row: usage.GpuRow) -> None:
    """Write nothing: a broker without books."""
    del row


def lost(entry: entries.LeaseEntry, job: slurm.Job, now: float, silent_s: float) -> bool:
    """Return whether the agent could not write the end of its lease.

    Args:
        entry: the lease, before it ends.
        job: as Slurm states its end.
        now: monotonic seconds.
        silent_s: seconds after which an agent counts as silent.
    """
    if job.state is slurm.JobState.NODE_FAIL:
        return True
    if entry.leaving:
        return False  # it said farewell, and wrote until then
    if entry.seen is None:
        return entry.asked is not None  # it never came; of another leader's lease we can't tell
    return now - entry.seen > silent_s


def row(lease: fleet.Lease, job: slurm.Job, heard_us: int) -> usage.GpuRow | None:
    """Return what is to be written; None if Slurm does not say from when to when the job ran.

    Args:
        lease: the lease.
        job: its job, ended.
        heard_us: when the agent was last heard, UTC µs by our clock; 0: this leader never heard it.
    """
    begin = job.started_us or lease.started_us
    if not begin or job.ended_us <= begin:
        return None
    start = max(begin, heard_us - BEFORE_US if heard_us else job.ended_us - UNHEARD_US)
    if job.ended_us <= start:
        return None
    return usage.GpuRow(
        cluster=lease.cluster,
        lease_id=lease.lease_id,
        slurm_job_id=job.job_id,
        run=job.restarts,
        node=",".join(lease.nodes),
        team=lease.team,
        kind=lease.kind.value,
        gpus=lease.gpus,
        parts=lease.hardware.parts,
        start_us=start,
        end_us=job.ended_us,
        seq=SEQ,
        lost=1,
    )


async def write(
    write_off: WriteOff, entry: entries.LeaseEntry, job: slurm.Job, time: clock.Clock
) -> None:
    """Write the end of a lease down; where that fails it is logged, and `reconcile` names the lease.

    Whatever the fault: a lease that could not end for it would be tried again at each tick for ever.
    """
    heard_us = 0
    if entry.seen is not None:
        heard_us = time.wall_us() - round((time.monotonic() - entry.seen) * 1_000_000)
    found = row(entry.lease, job, heard_us)
    if found is None:
        return
    try:
        await write_off(found)
    except Exception:
        log.exception("lease %s: its last GPU time is not written", found.lease_id)
