"""One job of the embedded Slurm: starts the script, passes signals on, leaves nothing behind.

Runs as a process of its own (``python -I -S embedded_runner.py FOLDER``), so that jobs outlive a broker
that restarts. It is what slurmstepd is to Slurm: a child subreaper, so that also processes which left
their session are found and ended. Standard library only; no import of Forebay.
"""

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def descendants(root: int) -> list[int]:
    """Return the live processes below ``root``, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found.extend(below)
        waiting.extend(below)
    return found


def start_time(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot; 0 if there is no such process."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def send(pids: list[int], number: int) -> None:
    """Send a signal to each; who is gone is gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def write(path: pathlib.Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """Read what `write` wrote, or None if it is not there yet."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return value


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


class Runner:
    """Watches one script from start to end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        self.stop_at: float | None = None
        self.stopped = False

    def run(self) -> None:
        """Start the script, wait for it, end what it left, and write down how it ended."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            child = self._start()
        except OSError as error:
            self._end(f"{error.errno or 1}:0", f"{error.filename}: {error.strerror}")
            return
        write(self.folder / "started.json", {"pid": child.pid, "start": start_time(child.pid)})
        while not self._ended(child):
            self._enforce()
            time.sleep(_POLL_S)
        self._clean()
        code = child.returncode
        self._end(f"{code}:0" if code >= 0 else f"0:{-code}", "")

    def _start(self) -> subprocess.Popen[bytes]:
        output = pathlib.Path(self.plan["output"])
        with output.open("ab") as log:
            return subprocess.Popen(
                [self.plan["script"]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.plan["directory"],
                env=self.plan["environment"],
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has no threads
            )

    def _stop(self, _number: int, _frame: object) -> None:
        """Pass the first SIGTERM on to everything; SIGKILL follows after the kill wait."""
        send(descendants(os.getpid()), signal.SIGTERM)
        self.stopped = True
        if self.stop_at is None:
            self.stop_at = time.monotonic() + float(self.plan["kill_wait_s"])

    @staticmethod
    def _ended(child: subprocess.Popen[bytes]) -> bool:
        """Reap what was adopted, without taking the script's own status from `child`."""
        while True:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return False
            if info.si_pid == child.pid:
                child.wait()
                return True
            os.waitpid(info.si_pid, 0)

    def _enforce(self) -> None:
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            send(descendants(os.getpid()), signal.SIGKILL)

    def _clean(self) -> None:
        """End what the script left, as proctrack does at the end of a job."""
        while left := descendants(os.getpid()):
            send(left, signal.SIGKILL)
            time.sleep(_POLL_S / 5)
            self._reap()

    def _reap(self) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return

    def _end(self, exit_code: str, reason: str) -> None:
        write(
            self.folder / "ended.json",
            {
                "exit_code": exit_code,
                "ended_us": time.time_ns() // 1000,
                "stopped": self.stopped,
                "reason": reason,
            },
        )


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    Runner(pathlib.Path(sys.argv[1])).run()
