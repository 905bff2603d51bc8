"""Processes that must not outlive who started them: parent death, groups, marks in the environment.

Engine workers that survive a killed parent keep GPU memory. Three nets: the kernel's parent-death
signal, the process group of each child, and a mark in the environment that even a detached process
inherits. Reads /proc; Linux only.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PARENT = "FOREBAY_PARENT_PID"  # environment of a child: who must live while it does
LEASE = "FOREBAY_LEASE"
SLOT = "FOREBAY_SLOT"
REPLICA = "FOREBAY_REPLICA"

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent dies; leave at once if that has happened.

    Args:
        parent: the pid that should be the parent, 0 if not known.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent and os.getppid() != parent:  # it died before the kernel was told
        print(f"parent {parent} is gone", file=sys.stderr)
        os._exit(1)


def start_time(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot; 0 if it does not live.

    With the pid it names a process for good: pids are used again. A zombie counts as gone.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if fields[0] in {"Z", "X"} else int(fields[19])


def alive(pid: int, started: int = 0) -> bool:
    """Whether the process lives, and is the one that started then (if given)."""
    found = start_time(pid)
    return found != 0 and started in {0, found}


def environment(pid: int) -> dict[str, str]:
    """Return the environment that ``pid`` was started with; empty if it can't be read."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def marked(marks: Mapping[str, str]) -> Iterator[int]:
    """Yield the pids of living processes whose environment holds all ``marks``."""
    wanted = [f"{name}={value}".encode() for name, value in marks.items()]
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or not ours
        if all(mark in entries for mark in wanted) and alive(int(folder.name)):
            yield int(folder.name)


def kill_marked(marks: Mapping[str, str], spare: frozenset[int] = frozenset()) -> list[int]:
    """Kill every process with ``marks`` except this one, its ancestors and ``spare``; returns whom."""
    if not marks:
        raise ValueError("no marks: that would be every process")
    kept = spare | ancestors()
    killed = [pid for pid in marked(marks) if pid not in kept]
    for pid in killed:
        kill(pid)
    return killed


def ancestors() -> frozenset[int]:
    """Return this process and those above it."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            stat = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        pid = int(stat[1])
    return frozenset(found)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process; no error if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group that ``pid`` leads; no error if it is gone."""
    if pid <= 1:
        raise ValueError(f"not a group of ours: {pid}")
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
