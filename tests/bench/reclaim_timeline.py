"""Where rung 3's time goes: a trial's milestones, out of the logs of Forebay and of Slurm's controller."""

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

# Each is the time from the milestone before it: together they are the whole time to ready.
STAGES: Mapping[str, str] = {
    "told": "order (the plan is written down; the agent, if it was told before) → the agent is told",
    "batch": "→ batch has left the engine, the replica drains",
    "replica": "→ the replica's rows are synced and its process has ended",
    "step": "→ the job step has ended: fork server, slot, slurmstepd, srun",
    "agent": "→ the agent has written its last row and the batch script has ended, by slurmctld",
    "epilog": "→ the job's epilog has run, by slurmctld",
    "allocated": "→ slurmctld gives the GPUs to the waiting job",
    "seen": "→ squeue shows it (asked every 20 ms)",
}
_OURS = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ", re.MULTILINE)
_SLURMS = re.compile(r"^\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})\] ", re.MULTILINE)


def moments(text: str, pattern: str) -> list[float]:
    """Return when (wall clock, seconds) each line that holds the pattern was written."""
    found: list[float] = []
    for line in text.splitlines():
        stamp = _OURS.match(line) or _SLURMS.match(line)
        if stamp and re.search(pattern, line):
            written = stamp.group(1).replace(",", ".")
            found.append(datetime.datetime.fromisoformat(written).timestamp())
    return found


def ordered(written: float, agent: str) -> float:
    """Return when a lease was to be given back, wall clock, seconds.

    An action takes effect before the whole plan is written down, so the agent may have been told before.

    Args:
        written: when the plan was written down.
        agent: the text of the agent's log.
    """
    return min([written, *(at for at in moments(agent, r"leaving: ") if at > written - 2.0)])


def stages(
    order: float, ready: float, jobs: tuple[str, str], logs: Mapping[str, str]
) -> dict[str, float]:
    """Return the seconds of each stage; empty if a milestone is missing.

    Args:
        order: when the lease was to be given back, wall clock, seconds.
        ready: when the new one was seen to run.
        jobs: the job that ends, and the one that gets its GPUs.
        logs: the text of ``agent``, ``slot`` and ``slurmctld``.
    """
    old, new = jobs
    ctld = logs["slurmctld"]
    wanted = (
        ("told", logs["agent"], r"leaving: "),
        ("batch", logs["slot"], r"→ draining"),
        ("replica", logs["slot"], r"→ stopped"),
        ("step", logs["agent"], r"its step has ended"),
        ("agent", ctld, rf"_slurm_rpc_complete_batch_script:? JobId={old}\b"),
        ("epilog", ctld, rf"_slurm_rpc_epilog_complete: JobId={old}\b"),
        ("allocated", ctld, rf"(Allocate|Started) JobId={new}\b"),
    )
    found: dict[str, float] = {}
    before = order
    for name, text, pattern in wanted:
        # Logs round down to milliseconds; and what an earlier trial wrote is not this one's.
        times = [at for at in moments(text, pattern) if order - 1.0 < at <= ready + 1.0]
        if not times:
            return {}
        at = max(before, times[0])
        found[name] = at - before
        before = at
    found["seen"] = max(0.0, ready - before)
    return found


def read(folder: Path, pattern: str) -> str:
    """Return the text of the files of a folder that match, one after the other."""
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob(pattern)))


def table(trials: Sequence[Mapping[str, float]]) -> list[tuple[str, float, float]]:
    """Return each stage's words, mean and longest time over the trials; the means add up."""
    if not trials:
        return []
    rows = []
    for name, words in STAGES.items():
        each = [trial[name] for trial in trials]
        rows.append((words, sum(each) / len(each), max(each)))
    return rows
