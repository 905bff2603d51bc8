"""What batch jobs still want of each model, for the broker, which lends them GPUs."""

from collections.abc import Mapping, Sequence

from batch_jobs import model
from scheduler.contracts import ports

TOKENS_A_LINE = 256  # sampled for a line, while a job has none that is done


def of_jobs(jobs: Sequence[model.BatchJob], now_us: int) -> Mapping[str, ports.BatchWork]:
    """Return the work that is left, by model; jobs that are held or not begun want nothing yet.

    A job's lines count for the model that the job names: those that name another one are few, and are told
    by the gateway's queues once they run.
    """
    found: dict[str, ports.BatchWork] = {}
    for job in jobs:
        counts = job.counts
        left = max(0, counts.total - counts.ok - counts.failed)
        if not left or not job.model or job.held or job.cancel_us or job.begin_us > now_us:
            continue
        each = job.used.output_tokens / counts.ok if counts.ok else TOKENS_A_LINE
        before = found.get(job.model, ports.BatchWork(0, 0))
        deadlines = [at for at in (before.deadline_us, job.deadline_us) if at]
        found[job.model] = ports.BatchWork(
            lines=before.lines + left,
            output_tokens=before.output_tokens + round(left * each),
            deadline_us=min(deadlines, default=0),
        )
    return found
