"""What batch jobs still want of each model, for the broker, which lends them GPUs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from batch_jobs import intake, model
from scheduler.contracts import ports

TOKENS_A_LINE = 256  # sampled for a line, while a job has none that is done

Shares = Callable[[int], Mapping[str, float]]
"""Which models the lines of a job name, by the job's id; shares that add up to 1, or nothing."""


def of_jobs(
    jobs: Sequence[model.BatchJob], now_us: int, shares: Shares
) -> Mapping[str, ports.BatchWork]:
    """Return the work that is left, by model; jobs that are held or not begun want nothing yet."""
    found: dict[str, ports.BatchWork] = {}
    for job in jobs:
        counts = job.counts
        left = max(0, counts.total - counts.ok - counts.failed)
        if not left or job.held or job.cancel_us or job.begin_us > now_us:
            continue
        each = job.used.output_tokens / counts.ok if counts.ok else TOKENS_A_LINE
        for name, share in (shares(job.job_id) or {job.model: 1.0}).items():
            served = name or job.model
            if served:
                before = found.get(served, ports.BatchWork(0, 0))
                deadlines = [at for at in (before.deadline_us, job.deadline_us) if at]
                found[served] = ports.BatchWork(
                    lines=before.lines + max(1, round(left * share)),
                    output_tokens=before.output_tokens + round(left * share * each),
                    deadline_us=min(deadlines, default=0),
                )
    return found


class Noted:
    """Looks up, once, how many lines of each job name which model, as intake noted it; `Shares`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._known: dict[int, Mapping[str, float]] = {}

    def __call__(self, job_id: int) -> Mapping[str, float]:
        """Return which models the lines of a job name (`intake.OTHERS`: further ones)."""
        found = self._known.get(job_id)
        if found is None:
            counts = intake.models(intake.job_folder(self._state_dir, job_id))
            if counts is None:
                return {}  # its files come later, or are gone: the job's own model counts
            total = sum(counts.values())
            if len(self._known) > 10_000:
                self._known.clear()
            found = {name: count / total for name, count in counts.items() if count}
            self._known[job_id] = found
        return found
