"""What a process and everything below it has used, from /proc."""

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """Return ``pid`` and all its living descendants."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found.extend(map(int, task.read_text().split()))
            except OSError:
                continue
    return found


def cpu_s(pid: int) -> float:
    """Return utime + stime in seconds, of every thread and living descendant."""
    return sum(times_s(pid))


def times_s(pid: int) -> tuple[float, float]:
    """Return utime and stime in seconds, of every thread and living descendant."""
    user = system = 0
    for each in tree(pid):
        try:
            stat = Path(f"/proc/{each}/stat").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        user, system = user + int(fields[11]), system + int(fields[12])
    return user * _TICK_S, system * _TICK_S


def rss_mb(pid: int) -> float:
    """Return the resident memory of the whole tree in MiB; shared pages count in each process."""
    pages = 0
    for each in tree(pid):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
