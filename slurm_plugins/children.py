"""Child processes under asyncio, without a child watcher.

`subprocess` starts them (by vfork, so that no gRPC fork handler of this process runs) and a pidfd says
when they end; both work the same under asyncio's own loop and uvloop, and beside live gRPC channels.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """How a short command ended; stderr is folded into ``output``."""

    code: int
    output: str


def spawn(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start ``argv`` in a session of its own, its output appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )


async def wait(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code once ``process`` has ended (negative: the signal, as Popen says it)."""
    if process.poll() is not None:
        return int(process.returncode)
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # kernels before 5.3 have none
        return await asyncio.to_thread(process.wait)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(handle, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()


async def run(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> Finished:
    """Run a short command to its end.

    Output goes to a file, not a pipe: a grandchild that keeps a pipe open would hold us up.

    Raises:
        TimeoutError: it took longer; it has been killed.
        FileNotFoundError: there is no such command.
    """
    with tempfile.TemporaryFile() as output:
        process = _into(output, argv, env)
        try:
            async with asyncio.timeout(timeout_s):
                code = await wait(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        return Finished(code, output.read().decode(errors="backslashreplace").strip())


def _into(
    output: IO[bytes], argv: Sequence[str], env: Mapping[str, str] | None
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)


def tail(log: Path, *, since: int = 0, most: int = 400) -> str:
    """Return the end of a log as one line, for an error message.

    Args:
        log: the file.
        since: what was in it before this many bytes is left out.
        most: bytes at most.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - most))
            return " ".join(file.read().decode(errors="backslashreplace").split())
    except OSError:
        return ""


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a process group; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
