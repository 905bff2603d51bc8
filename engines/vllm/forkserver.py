"""Imports vLLM once, then forks a replica whenever the slot's supervisor asks for one.

``<engine environment>/bin/python -P -m engines.vllm.forkserver``; commands on stdin, events on stdout
(`engines.forkproto`), log on stderr. Importing takes 11 to 15 s and most of a replica's memory; a forked
replica is ready after 1 to 2 s and shares those pages. The process starts no thread of Python's and runs
no kernel, because a forked child inherits neither threads nor their locks in a usable state (OpenBLAS,
which starts threads when it is loaded, ends them before a fork itself).
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import logging
import os
import selectors
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from engines import forkproto, processes
from engines.vllm import process

_PR_SET_CHILD_SUBREAPER = 36
_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Replica:
    """A forked replica: its id, its status pipe (-1 once closed) and what it has said last."""

    id: str
    pipe: int
    buffer: bytearray = dataclasses.field(default_factory=bytearray)
    reason: str = ""


class ForkServer:
    """The loop: commands in, forks, status lines out, children reaped.

    Args:
        commands: descriptor to read commands from.
        events: descriptor to write events to.
    """

    def __init__(self, commands: int, events: int) -> None:
        self._commands = commands
        self._events = events
        self._buffer = bytearray()
        self._replicas: dict[int, _Replica] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._wakeup, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the supervisor's end closes; then kill every replica."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Slurm signals every process of a step: the supervisor decides, and closes our stdin.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        try:
            while self._step():
                pass
        finally:
            for pid in self._replicas:
                processes.kill_group(pid)
            for pid in _children():
                processes.kill(pid)

    def _step(self) -> bool:
        """Wait for something and handle it; False once the supervisor is gone."""
        alive = True
        for key, _ in self._selector.select():
            if key.fd == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            elif key.fd == self._commands:
                alive = self._read_commands() and alive
            else:
                self._read_status(key.data)
        self._reap()
        return alive

    def _read_commands(self) -> bool:
        chunk = os.read(self._commands, 65536)
        self._buffer += chunk
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            try:
                message = forkproto.decode(line)
            except forkproto.ProtocolError:
                _log.exception("command ignored")
                continue
            if isinstance(message, forkproto.Start):
                self._start(message)
            elif isinstance(message, forkproto.Signal):
                self._signal(message)
        return bool(chunk)

    def _start(self, message: forkproto.Start) -> None:
        if any(replica.id == message.id for replica in self._replicas.values()):
            self._tell(forkproto.Refused(message.id, f"{message.id} runs already"))
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(ours)
            os.close(theirs)
            self._tell(forkproto.Refused(message.id, f"fork: {error.strerror}"))
            return
        if pid == 0:
            self._become_replica(message, theirs, parent)
        os.close(theirs)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does it too: whoever comes first
        replica = self._replicas[pid] = _Replica(message.id, ours)
        self._selector.register(ours, selectors.EVENT_READ, replica)
        self._tell(forkproto.Started(message.id, pid))

    def _become_replica(self, message: forkproto.Start, status: int, parent: int) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            processes.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for descriptor in (self._commands, self._events, self._wakeup, self._woken):
                os.close(descriptor)
            for replica in self._replicas.values():
                if replica.pipe >= 0:
                    os.close(replica.pipe)
            code = _replica(message, status)
        except BaseException:  # nothing may return into the fork server's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _signal(self, message: forkproto.Signal) -> None:
        for pid, replica in self._replicas.items():
            if replica.id == message.id:
                if message.number == signal.SIGKILL:
                    processes.kill_group(pid)
                processes.kill(pid, message.number)

    def _read_status(self, replica: _Replica) -> None:
        chunk = os.read(replica.pipe, 65536)
        if not chunk:
            self._close(replica)
            return
        replica.buffer += chunk
        *lines, rest = bytes(replica.buffer).split(b"\n")
        replica.buffer = bytearray(rest)
        for line in lines:
            status = forkproto.decode_status(line)
            replica.reason = str(status.get("failed") or replica.reason)
            self._tell(forkproto.Status(replica.id, status))

    def _close(self, replica: _Replica) -> None:
        if replica.pipe >= 0:
            self._selector.unregister(replica.pipe)
            os.close(replica.pipe)
            replica.pipe = -1

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                replica = self._replicas.pop(pid, None)
                if replica is not None:
                    self._bury(pid, replica, os.waitstatus_to_exitcode(status))

    def _bury(self, pid: int, replica: _Replica, code: int) -> None:
        # Whatever the replica has started goes with it: its group, and what was handed to us.
        processes.kill_group(pid)
        for orphan in _children() - self._replicas.keys():
            processes.kill(orphan)
        while replica.pipe >= 0 and _readable(replica.pipe):
            self._read_status(replica)
        self._close(replica)
        self._tell(forkproto.Exited(replica.id, pid, code, replica.reason))

    def _tell(self, event: forkproto.Event) -> None:
        _write(self._events, event)


def _write(descriptor: int, event: forkproto.Event) -> None:
    line = memoryview(forkproto.encode(event))
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone: its stdin end says so too
        while line:
            line = line[os.write(descriptor, line) :]


def _readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


def _children() -> set[int]:
    """Return the processes whose parent this process is, adopted orphans included."""
    try:
        return {
            int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        }
    except OSError:
        return set()


def _replica(message: forkproto.Start, status: int) -> int:
    """Be the replica: the body of the forked process; returns its exit code."""
    from engines.replica import child, launch

    if message.log:
        log = os.open(message.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.update(message.env)
    os.environ[processes.PARENT] = str(os.getppid())
    reporter = launch.PipeReporter(status)
    _title(message.id)
    try:
        record = launch.Launch.from_json(message.launch)
        child.live(record, record.open_sink, reporter)
    except Exception as error:
        _log.exception("replica %s", message.id)
        reporter.failed(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _title(replica_id: str) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("setproctitle").setproctitle(f"forebay: replica {replica_id}")


def main() -> int:
    """Run the fork server on this process's stdin and stdout."""
    processes.die_with_parent()
    # Orphans of a killed replica come to us, to be killed.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # whatever an import prints must not end up between the events
    os.close(nothing)
    began = time.monotonic()
    try:
        process.prepare()
        from engines.vllm import adapter, configure

        adapter.preload()
    except Exception as error:
        traceback.print_exc()
        _write(events, forkproto.Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"))
        return 1
    gc.collect()
    gc.freeze()  # what is shared now stays untouched by the children's collections
    # Only now: what was imported has set up logging for itself.
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
    took = round(time.monotonic() - began, 3)
    _write(events, forkproto.Ready(os.getpid(), "vllm", configure.version(), took))
    ForkServer(commands, events).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
