"""The batch runner on an engine that answers at once: lines a second of its own CPU, memory, resuming.

The gateway is a process of its own that answers every line with the same 200; the runner is the site's own,
in another; what it takes is read from /proc. One run is killed half-way and resumed, once with its checkpoint
and once without.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from batch_jobs import checkpoint, daemon, intake, journal, lines, model, results, settings
from batch_jobs import store as stores
from scheduler.contracts import clock
from scheduler.runtime.registry import database
from tests.bench import processes

_PROCESSES = multiprocessing.get_context("spawn")
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "chat",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "an answer of some ten words, as good as any",
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30},
    }
).encode()
_HEAD = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_PATIENCE_S = 300.0  # without a sign of the runner: a million results are written in some 30


class _Instant(asyncio.Protocol):
    """HTTP/1.1 as little as will do: whole requests in, the same answer out."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = _HEAD.search(self._buffer, 0, end)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            self._buffer = self._buffer[size:]
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            if self._transport is not None:
                self._transport.write(head % len(ANSWER) + ANSWER)


def serve_instantly(told: Any) -> None:
    """Be the gateway, in a process of its own."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Instant, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def run_jobs(state_dir: str, url: str) -> None:
    """Be the batch runner, in a process of its own, until killed."""

    async def run() -> None:
        store = stores.open_store(database.sqlite_url(Path(state_dir)))
        await daemon.serve(
            settings.BatchJobsSettings(),
            store=store,
            state_dir=Path(state_dir),
            gateway_url=url,
            service_key="bench",
            clock=clock.SystemClock(),
        )

    uvloop.run(run())  # as `forebay batchd` runs


def written(count: int, *, short: bool = False) -> Iterator[bytes]:
    """Yield the lines of a file, half of which share a prefix with a hundred others; short: none."""
    for number in range(1, count + 1):
        said = f"question {number}: what follows from the text above?"
        if number % 2 and not short:
            said = f"chapter {number // 200}. " + "some text that many share. " * 8 + said
        body = {"model": "chat", "messages": [{"role": "user", "content": said}], "max_tokens": 16}
        fields = {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }
        yield json.dumps(fields).encode() + b"\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Took:
    """What a run took: wall and CPU seconds of the runner, the most memory that it held in MiB."""

    lines: int
    wall_s: float
    cpu_s: float
    rss_mb: float


def take_in(state_dir: str, count: int, short: bool, told: Any) -> None:
    """Take a file in, as the gateway does, in a process of its own; tells what that took."""
    store = stores.open_store(database.sqlite_url(Path(state_dir)))
    began, cpu = time.perf_counter(), time.process_time()
    taken = intake.Intake(Path(state_dir), lines.Rules(), 1 << 20)
    made_s = 0.0
    chunk: list[bytes] = []
    source = written(count, short=short)
    while True:
        before = time.process_time()
        chunk = list(itertools.islice(source, 4_096))
        made_s += time.process_time() - before
        if not chunk:
            break
        taken.feed(b"".join(chunk))
    report = taken.finish()
    job = model.BatchJob(
        0,
        "bench",
        "bench",
        counts=model.Counts(total=report.total),
        last_line=report.last_line,
        submitted_us=1,
    )
    store.add(job, taken.place)
    store.close()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu - made_s
    told.send(Took(count, wall_s, cpu_s, peak_mb(os.getpid())))


def submit(state_dir: Path, count: int, *, short: bool = False) -> tuple[stores.Store, Took]:
    """Submit a file; returns the store, and what taking the file in took."""
    took: Took = in_process(take_in, str(state_dir), count, short)
    return stores.open_store(database.sqlite_url(state_dir)), took


def in_process(body: Callable[..., None], *arguments: Any) -> Any:
    """Return what a function tells through the pipe that is its last argument, in a process of its own."""
    mine, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=body, args=(*arguments, theirs))
    process.start()
    theirs.close()
    told = mine.recv()
    process.join()
    return told


def peak_mb(pid: int) -> float:
    """Return the most memory that a process held, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


class Runner:
    """The runner's process."""

    def __init__(self, state_dir: Path, url: str) -> None:
        self._process = _PROCESSES.Process(target=run_jobs, args=(str(state_dir), url), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        self.began = time.perf_counter()
        self._ready_cpu = 0.0

    def until(self, store: stores.Store, holds: Callable[[model.BatchJob], bool]) -> model.BatchJob:
        """Wait until something is true of the job.

        Raises:
            RuntimeError: the runner or the job ended without, or nothing came of it for `_PATIENCE_S`.
        """
        before: model.BatchJob | None = None
        since = time.monotonic()
        while True:
            job = store.get(1)
            assert job is not None
            if holds(job):
                return job
            if job != before:
                before, since = job, time.monotonic()
            ended = self._process.exitcode is not None or job.state.final
            if ended or time.monotonic() - since > _PATIENCE_S:
                self.kill()
                raise RuntimeError(f"the batch runner came no further than {job}")
            time.sleep(0.05)

    def took(self, count: int, cpu_before: float = 0.0) -> Took:
        """Return what it took so far."""
        cpu = processes.cpu_s(self.pid) - cpu_before
        return Took(count, time.perf_counter() - self.began, cpu, peak_mb(self.pid))

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join()


def counted(state_dir: Path, count: int) -> tuple[int, int]:
    """Return how many custom ids are lost, and how many stand more than once."""
    seen = bytearray(count + 1)
    with (intake.job_folder(state_dir, 1) / results.OUTPUT).open("rb") as file:
        for line in file:
            number = int(line.split(b'"custom_id":"c', 1)[1].split(b'"', 1)[0])
            seen[number] = min(seen[number] + 1, 255)
    return seen.count(0, 1), sum(each - 1 for each in seen if each > 1)


@contextlib.contextmanager
def instant_gateway() -> Iterator[str]:
    """Run the gateway that answers at once; yields its address."""
    mine, theirs = _PROCESSES.Pipe()
    gateway = _PROCESSES.Process(target=serve_instantly, args=(theirs,), daemon=True)
    gateway.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        gateway.kill()
        gateway.join()


def measure(folder: Path, count: int) -> dict[str, Any]:
    """Run ``count`` lines, killed half-way and resumed."""
    with instant_gateway() as url:
        store, intake_took = submit(folder, count)
        first = Runner(folder, url)
        idle_cpu = _started(first, store)
        first.until(store, lambda job: job.counts.ok >= count // 2)
        half = store.get(1)
        assert half is not None
        before = first.took(half.counts.ok, idle_cpu)
        first.kill()
        resume_s = resumed(folder, count)
        again_s, after = finished(folder, url, store, half.counts.ok)
        lost, twice = counted(folder, count)
        store.close()
    return {
        "lines": count,
        "lines_per_cpu_s": round(before.lines / max(0.001, before.cpu_s)),
        "lines_per_s": round(before.lines / before.wall_s),
        "rss_mb": round(max(before.rss_mb, after.rss_mb), 1),
        "intake_lines_per_cpu_s": round(count / max(0.001, intake_took.cpu_s)),
        "intake_rss_mb": round(intake_took.rss_mb, 1),
        "recover_s": resume_s,
        "resume_s": round(again_s, 2),
        "lost": lost,
        "duplicated": twice,
        "cores": os.cpu_count(),
    }


def finished(folder: Path, url: str, store: stores.Store, known: int) -> tuple[float, Took]:
    """Let a new runner end the job.

    Returns:
        The seconds until it had told of a new answer, and what all of it took.
    """
    runner = Runner(folder, url)
    runner.until(store, lambda job: job.counts.ok > known)
    again_s = time.perf_counter() - runner.began
    job = runner.until(store, lambda job: job.state.final)
    took = runner.took(job.counts.ok)
    runner.kill()
    return again_s, took


def _started(runner: Runner, store: stores.Store) -> float:
    """Wait until a runner works; returns the CPU seconds that its start took."""
    runner.until(store, lambda job: job.state is not model.State.PENDING)
    runner.began = time.perf_counter()
    return processes.cpu_s(runner.pid)


def resumed(
    folder: Path, count: int, names: Sequence[str] = ("checkpoint", "journal_alone")
) -> dict[str, float]:
    """Return the seconds that reading the journal takes, with its checkpoint and without."""
    path = intake.job_folder(folder, 1) / results.JOURNAL
    kept = path.parent / checkpoint.NAME
    found = {}
    for name in names:
        began = time.perf_counter()
        journal.recover(path, count)
        found[name] = round(time.perf_counter() - began, 2)
        if kept.exists() and len(names) > 1:
            kept.rename(kept.with_suffix(".aside"))
    aside = kept.with_suffix(".aside")
    if aside.exists():
        aside.rename(kept)
    return found
