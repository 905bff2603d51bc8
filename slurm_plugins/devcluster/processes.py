"""The cluster's processes: started in their own sessions, found again by a mark, ended by pid.

A daemon's environment carries the cluster's folder, so that whoever comes later (also after a kill -9 of
the process that started it) finds all of them and nobody else's.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from slurm_plugins.devcluster import site

_MARK = "FOREBAY_DEVCLUSTER"
_NAME = "FOREBAY_DEVCLUSTER_DAEMON"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One live process."""

    pid: int
    started: int  # clock ticks since boot: tells a pid's next owner from this one
    parent: int
    environ: Mapping[str, str]


def environment(where: site.Layout, extra: Mapping[str, str]) -> dict[str, str]:
    """Return a daemon's whole environment: little, and marked."""
    return {
        "PATH": _PATH,
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(where.slurm_conf),
        _MARK: str(where.base),
        **extra,
    }


def spawn(where: site.Layout, name: str, argv: Sequence[str], extra: Mapping[str, str]) -> int:
    """Start a daemon that outlives us, its output in ``log/<name>.out``; return its pid."""
    _pid_file(where, name).unlink(missing_ok=True)
    out = where.log / f"{name}.out"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        argv[0],
        list(argv),
        environment(where, {_NAME: name, **extra}),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(out), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    _pid_file(where, name).write_text(f"{pid} {_started(pid)}\n")
    return pid


def living(where: site.Layout, name: str) -> int | None:
    """Return the pid of daemon ``name`` if the process that we started still lives.

    Whoever started it may have been killed before its pid was written down: then its mark tells.
    """
    try:
        pid, started = map(int, _pid_file(where, name).read_text().split())
    except (FileNotFoundError, ValueError):
        return _unrecorded(where, name)
    return pid if started and _started(pid) == started else None


def _unrecorded(where: site.Layout, name: str) -> int | None:
    """Find a daemon by its mark, which its children inherit: the one whose parent has none."""
    marked = {
        process.pid: process
        for process in _everyone()
        if process.environ.get(_MARK) == str(where.base) and process.environ.get(_NAME) == name
    }
    found = [each for each in marked.values() if each.parent not in marked]
    return min(found, key=lambda each: each.started).pid if found else None


def members(where: site.Layout) -> list[Process]:
    """List every process of the cluster: daemons, step daemons, jobs and what those left behind."""
    everyone = _everyone()
    children: dict[int, list[Process]] = {}
    for process in everyone:
        children.setdefault(process.parent, []).append(process)
    ours: dict[int, Process] = {}
    waiting = [process for process in everyone if _belongs(process, where)]
    while waiting:
        process = waiting.pop()
        if process.pid in ours or process.pid == os.getpid():
            continue
        ours[process.pid] = process
        waiting += children.get(process.pid, [])
    return list(ours.values())


def _belongs(process: Process, where: site.Layout) -> bool:
    """Whether it is a daemon of ours, or was started inside one of our jobs."""
    environ = process.environ
    if environ.get(_MARK) == str(where.base):
        return True
    return "SLURM_JOB_ID" in environ and environ.get("SLURM_CONF") == str(where.slurm_conf)


def stop(where: site.Layout, names: Iterable[str], *, grace_s: float = 5.0) -> None:
    """End daemons one after the other: SIGTERM, and SIGKILL after ``grace_s``."""
    for name in names:
        pid = living(where, name)
        if pid is not None:
            _end([pid], grace_s)
        _pid_file(where, name).unlink(missing_ok=True)


def sweep(where: site.Layout) -> None:
    """End everything that is left of the cluster, jobs too."""
    for _ in range(20):  # what is killed may have been forking
        left = members(where)
        if not left:
            return
        _end([process.pid for process in left], 0.0)
    pids = " ".join(str(process.pid) for process in members(where))
    raise site.DevClusterError(
        f"processes {pids} of {where.folder} can't be killed: look at them with ps"
    )


def _end(pids: Sequence[int], grace_s: float) -> None:
    for pid in pids:
        _signal(pid, signal.SIGTERM if grace_s else signal.SIGKILL)
    if not wait_until(lambda: not any(map(_started, pids)), grace_s or 5.0):
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(_started, pids)), 5.0)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition: Callable[[], bool], limit_s: float, *, every_s: float = 0.05) -> bool:
    """Poll ``condition`` until it holds; False after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


def _pid_file(where: site.Layout, name: str) -> Path:
    return where.run / f"{name}.pid"


def _stat(pid: int) -> list[str]:
    """Return /proc/PID/stat from the state on; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _started(pid: int) -> int:
    """Return the start time, or 0 for a process that is gone; a dead child of ours is reaped."""
    fields = _stat(pid)
    if not fields or fields[0] in "ZX":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return 0
    return int(fields[19])


def _everyone() -> list[Process]:
    processes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        fields = _stat(int(entry.name))
        if not fields or fields[0] in "ZX":
            continue
        try:
            raw = (entry / "environ").read_bytes()
        except OSError:  # gone, or not ours to read
            continue
        pairs = (item.partition("=") for item in os.fsdecode(raw).split("\0") if item)
        environ = {key: value for key, _, value in pairs}
        processes.append(Process(int(entry.name), int(fields[19]), int(fields[1]), environ))
    return processes
