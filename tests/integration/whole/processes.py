"""Finds an installation's processes by the mark in their environment, whoever started them."""

import dataclasses
import os
import signal
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One living process."""

    pid: int
    argv: tuple[str, ...]

    @property
    def part(self) -> str:
        """The subcommand of `python -m forebay`, or ""."""
        if "forebay" not in self.argv[:-1]:
            return ""
        return self.argv[self.argv.index("forebay") + 1]

    def kill(self) -> None:
        """End it as a crash does."""
        os.kill(self.pid, signal.SIGKILL)


def marked(mark: str) -> list[Process]:
    """List the processes whose environment holds ``mark``, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            words = (entry / "cmdline").read_bytes()
        except OSError:  # it has gone, or is not ours to read
            continue
        if mark.encode() in environment and words:
            argv = tuple(words.decode(errors="replace").rstrip("\0").split("\0"))
            found.append(Process(int(entry.name), argv))
    return found
