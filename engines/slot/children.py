"""Replicas as processes: plain children, or children of a fork server that has vLLM imported.

Nothing runs between fork and exec here (`subprocess` uses vfork), since this process holds gRPC threads.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from engines import forkproto, processes
from engines.replica import launch

ROOT = Path(__file__).resolve().parents[2]  # where the import packages lie, for other environments


class StartError(Exception):
    """A replica's process could not be started; the message is one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How a replica's process ended: exit code (minus the signal that killed it), and its last word."""

    code: int
    reason: str = ""

    def __str__(self) -> str:
        """Return it as words."""
        how = f"exit code {self.code}"
        if self.code < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-self.code).name}"
        return f"{how}: {self.reason}" if self.reason else how


class Child(Protocol):
    """A replica's process."""

    @property
    def pid(self) -> int:
        """Its pid, which leads its process group; 0 until it exists."""
        ...

    async def wait(self) -> Exit:
        """Return how it ended, once it has."""
        ...

    def signal(self, number: int) -> None:
        """Send it a signal; no error if it is gone. SIGKILL takes its whole group."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What to start.

    Attributes:
        record: the launch record.
        record_file: where it lies.
        env: the whole environment of a plain child; a fork server's child gets ``extra_env``.
        extra_env: what differs from the slot's own environment.
        log: file for its output, appended.
        heard: called with each status line.
    """

    record: launch.Launch
    record_file: Path
    env: Mapping[str, str]
    extra_env: Mapping[str, str]
    log: Path
    heard: Callable[[Mapping[str, Any]], None]


async def wait_pid(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code once ``process`` has ended, without a child watcher's thread."""
    if process.poll() is not None:
        return int(process.returncode)
    handle = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()


async def end(child: Child, ended: "asyncio.Task[Exit]", patience_s: float) -> bool:
    """End a process, by force after a while; false: it does not die."""
    for number, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        if not ended.done():
            child.signal(number)
            await asyncio.wait({ended}, timeout=seconds)
    return ended.done()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: ours, ``extra``, our pid, and where the packages lie."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    tied = {processes.PARENT: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **tied, **extra}


class PlainChild:
    """A child process with its own session, and a pipe for its status lines."""

    def __init__(self, process: "subprocess.Popen[bytes]", pipe: int, order: Order) -> None:
        self._process = process
        self._pipe = pipe
        self._order = order
        self._buffer = bytearray()
        self._failure = ""
        self._over = asyncio.Event()
        os.set_blocking(pipe, False)
        asyncio.get_running_loop().add_reader(pipe, self._read)

    @classmethod
    def start(cls, argv: Sequence[str], order: Order) -> "PlainChild":
        """Start ``argv``.

        Raises:
            StartError: it can't be started.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            with order.log.open("ab") as log:
                process = subprocess.Popen(
                    [*argv, "--spec", str(order.record_file)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**order.env, launch.STATUS_FD: str(theirs)},
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(ours)
            raise StartError(f"{argv[0]}: {error.strerror}") from error
        finally:
            os.close(theirs)
        return cls(process, ours, order)

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def _read(self) -> None:
        try:
            chunk = os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self._close()
            return
        self._buffer += chunk
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            status = forkproto.decode_status(line)
            self._failure = str(status.get("failed") or self._failure)
            self._order.heard(status)

    def _close(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    async def wait(self) -> Exit:
        """Return how it ended; its group is killed then."""
        code = await wait_pid(self._process)
        processes.kill_group(self.pid)
        if self._pipe >= 0:
            self._read()  # its last words, if they are still in the pipe
            self._close()
        return Exit(code, self._failure)

    def signal(self, number: int) -> None:
        """Send a signal."""
        if self._process.poll() is None:
            if number == signal.SIGKILL:
                processes.kill_group(self.pid)
            processes.kill(self.pid, number)


class ForkedChild:
    """A child of the fork server."""

    def __init__(self, server: "ForkServer", order: Order) -> None:
        self._server = server
        self.order = order
        self.started = 0
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Its pid, 0 until the fork."""
        return self.started

    async def wait(self) -> Exit:
        """Return how it ended."""
        return await asyncio.shield(self.exit)

    def signal(self, number: int) -> None:
        """Send a signal through the fork server; a killed one dies with its group."""
        if not self.exit.done():
            self._server.send(forkproto.Signal(self.order.record.replica_id, number))
            if number == signal.SIGKILL and self.started:
                processes.kill_group(self.started)

    def end(self, how: Exit) -> None:
        """Note that it ended."""
        if not self.exit.done():
            self.exit.set_result(how)


class ForkServer:
    """The supervisor's end of a fork server; `serve` runs it, replicas may be ordered before it is ready.

    Args:
        python: the engine environment's python.
        log: file for its log.
        told: called when it becomes ready or fails.
    """

    def __init__(self, python: str, log: Path, told: Callable[[], None]) -> None:
        self._argv = [python, "-P", "-m", "engines.vllm.forkserver"]
        self._log = log
        self._told = told
        self._process: subprocess.Popen[bytes] | None = None
        self._children: dict[str, ForkedChild] = {}
        self._task: asyncio.Task[None] | None = None
        self.import_s = 0.0
        self.ready = False

    @property
    def pid(self) -> int:
        """The fork server's process, 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it, unless it runs.

        Raises:
            StartError: it can't be started.
        """
        if self._task is not None and not self._task.done():
            return
        extra = environment({})
        extra.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules halve the import
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=extra,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(f"fork server {self._argv[0]}: {error.strerror}") from error
        self.ready = False
        self._task = asyncio.create_task(self._serve(self._process))

    def order(self, order: Order) -> ForkedChild:
        """Have a replica forked; starts the server if need be.

        Raises:
            StartError: the server can't be started.
        """
        self.start()
        child = self._children[order.record.replica_id] = ForkedChild(self, order)
        self.send(
            forkproto.Start(
                order.record.replica_id,
                order.record.to_json(),
                dict(order.extra_env),
                str(order.log),
            )
        )
        return child

    def send(self, command: forkproto.Command) -> None:
        """Send a command; if the server is gone, `_serve` ends its replicas."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._process.stdin.write(forkproto.encode(command))
                self._process.stdin.flush()

    async def _serve(self, process: "subprocess.Popen[bytes]") -> None:
        reader = asyncio.StreamReader(limit=forkproto.MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        reason = ""
        try:
            while line := await reader.readline():
                event = forkproto.decode(line)
                if isinstance(event, forkproto.Failed):
                    reason = event.reason
                else:
                    self._event(event)
        finally:
            transport.close()
            await self._bury(process, reason)

    async def _bury(self, process: "subprocess.Popen[bytes]", reason: str) -> None:
        self.ready = False
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        processes.kill_group(process.pid)
        code = await wait_pid(process)
        how = Exit(code, f"the fork server ended: {reason or 'see its log'}")
        for child in list(self._children.values()):
            if child.started:
                processes.kill_group(child.started)
            child.end(how)
        self._children.clear()
        self._told()

    def _event(self, event: forkproto.Event) -> None:
        if isinstance(event, forkproto.Ready):
            self.ready, self.import_s = True, event.import_s
            self._told()
            return
        child = self._children.get(getattr(event, "id", ""))
        if child is None:
            return
        if isinstance(event, forkproto.Started):
            child.started = event.pid
            if self.import_s:
                child.order.heard({"phase": "fork server", "seconds": self.import_s})
        elif isinstance(event, forkproto.Status):
            child.order.heard(event.status)
        elif isinstance(event, forkproto.Refused):
            child.end(Exit(1, event.reason))
        elif isinstance(event, forkproto.Exited):
            del self._children[event.id]
            child.end(Exit(event.code, event.reason))

    async def close(self) -> None:
        """End it and its replicas, at once: it holds nothing, and its orderly exit takes 1 to 2 s."""
        if self._process is None or self._task is None:
            return
        processes.kill_group(self._process.pid)
        await asyncio.wait({self._task})


def record_text(record: launch.Launch) -> str:
    """Return a launch record as its file's text."""
    return json.dumps(record.to_json())


def last_lines(log: Path, most: int = 600) -> str:
    """Return the last whole lines of a log, at most so many bytes of it, as one line: `this | that`."""
    try:
        with log.open("rb") as file:
            skipped = max(0, log.stat().st_size - most)
            file.seek(skipped)
            text = file.read().decode(errors="backslashreplace")
    except OSError:
        return ""
    lines = text.splitlines()
    if skipped and len(lines) > 1:
        del lines[0]  # its beginning is not there
    return " | ".join(" ".join(line.split()) for line in lines if line.strip())
