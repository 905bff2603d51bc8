"""`forebay up`: broker, gateway and batch runner as one tree of processes, restarted when they die.

The parent decides nothing: it starts, waits for the ready line, restarts with a back-off, and at the
end stops in an order in which nothing is cut: the doors first, then who feeds them, the broker last.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

READY_FD_OPTION = "--ready-fd"
PARENT_OPTION = "--parent"
_READY_S = 120.0  # imports take a second, and many on a busy machine
_STOP_GRACE_S = 40.0  # a gateway drains its streams for up to 30 s
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)


class StartError(Exception):
    """A part did not come up; the message holds the last lines of its log."""


@dataclasses.dataclass
class Part:
    """One child process.

    Attributes:
        name: the name of its log.
        command: its subcommand.
        ready: what it said when it was ready (addresses), once it has.
    """

    name: str
    command: str
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    watcher: asyncio.Task[None] | None = None
    restarts: int = 0


class Tree:
    """The parts of one installation on this machine.

    Args:
        options: options for every part (``--config FILE``).
        logs: folder for one log a part.
        env: environment of the parts.
        say: where restarts are reported.
        stable_s: life after which the next restart does not wait longer for the ones before.
    """

    def __init__(
        self,
        options: Sequence[str],
        logs: Path,
        env: Mapping[str, str],
        say: Callable[[str], None],
        stable_s: float,
    ) -> None:
        self._options = tuple(options)
        self._logs = logs
        self._env = dict(env)
        self._say = say
        self._stable_s = stable_s
        self._stopping = False
        self.parts: dict[str, Part] = {}
        self.ended: Callable[[int], None] | None = (
            None  # called with the pid of a part that has died
        )

    async def start(
        self, name: str, timeout_s: float = _READY_S, *, command: str = ""
    ) -> dict[str, Any]:
        """Start part ``name`` and return what it says when it is ready.

        Args:
            name: the name of its log, and its subcommand if ``command`` is not given.
            timeout_s: how long it may take.
            command: its subcommand, for parts of which there are several.

        Raises:
            StartError: it ended, or said nothing in time.
        """
        part = self.parts[name] = Part(name, command or name)
        await self._spawn(part, timeout_s)
        part.watcher = asyncio.create_task(self._watch(part), name=f"watch {name}")
        return part.ready

    def settle(self, env: Mapping[str, str]) -> None:
        """Give parts that start from now on, restarts included, these variables too."""
        self._env.update(env)

    async def end(self, names: Sequence[str]) -> None:
        """Stop some parts, all at once; returns when they are gone."""
        parts = [self.parts.pop(name) for name in names if name in self.parts]
        watchers = [part.watcher for part in parts if part.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(_end(part.process) for part in parts))

    async def stop(self) -> None:
        """Stop every part, the one started last first; returns when all are gone."""
        self._stopping = True
        for part in reversed(list(self.parts.values())):
            if part.watcher is not None:
                part.watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await part.watcher
            await _end(part.process)
        self.parts.clear()

    async def _spawn(self, part: Part, timeout_s: float) -> None:
        reader, writer = os.pipe()
        log = self._logs / f"{part.name}.log"
        argv = [
            *(sys.executable, "-P", "-m", "forebay", part.command, *self._options),
            *(READY_FD_OPTION, str(writer), PARENT_OPTION, str(os.getpid())),
        ]
        try:
            with log.open("ab") as file:
                part.process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=self._env,
                    pass_fds=(writer,),
                    start_new_session=True,  # a Ctrl-C is for the parent, which stops us in order
                )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            line = await asyncio.wait_for(_line(reader), timeout_s)
        except TimeoutError:
            line = b""
        if not line:
            await _end(part.process)
            raise StartError(f"{part.name} did not come up; its log ends:\n{_tail(log)}")
        part.ready = json.loads(line)

    async def _watch(self, part: Part) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not self._stopping and part.process is not None:
            code = await part.process.wait()
            if self.ended is not None:
                self.ended(part.process.pid)
            if loop.time() - started >= self._stable_s:
                part.restarts = 0
            delay = _BACKOFF_S[min(part.restarts, len(_BACKOFF_S) - 1)]
            part.restarts += 1
            self._say(f"{part.name} ended with code {code}; starting it again in {delay} s")
            await asyncio.sleep(delay)
            started = loop.time()
            try:
                await self._spawn(part, _READY_S)
            except StartError as error:
                self._say(str(error))
            except OSError as error:  # a full disk, no memory: it is tried again as one that ended
                self._say(f"{part.name} can't be started: {error}")


async def _line(fd: int) -> bytes:
    """Read one line from a pipe; b"" if the other side closed it without one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(fd, "rb", 0) as file:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        try:
            return await reader.readline()
        finally:
            transport.close()


async def _end(process: asyncio.subprocess.Process | None) -> None:
    if process is None or process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _STOP_GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _tail(log: Path, lines: int = 12) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({log}: {error.strerror})"
