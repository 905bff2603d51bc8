"""What one request and one token cost Forebay's gateway process alone, for work on it.

The gateway has one CPU and everything else the others; many short rounds, of which the least is told
beside the median: what another program on the machine takes away only ever adds. User and system time
are told apart. The last line is JSON. ``--hold`` keeps the load up for a profiler.

Usage: ``python -m tests.bench.gateway_cost [--rounds 15] [--hold 10]``
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import gateway, gateway_subjects, processes

_CLOSED = {"do": "closed", "connections": 32, "requests": 600, "limit_s": 5.0}
_SERIAL = {"do": "closed", "connections": 1, "requests": 150, "limit_s": 5.0}
_STREAMS = {"do": "streams", "connections": 256, "window_s": 1.0, "limit_s": 20.0}
PHASES: Mapping[str, tuple[dict[str, Any], str]] = {
    "request": (_CLOSED, "cpu_us_per_request"),
    "alone": (_SERIAL, "cpu_us_per_request"),
    "token": (_STREAMS, "cpu_us_per_token"),
}


def split(pid: int, before: tuple[float, float]) -> float:
    """Return which share of the CPU time since ``before`` was the system's."""
    user, system = (now - then for now, then in zip(processes.times_s(pid), before, strict=True))
    return system / (user + system) if user + system else 0.0


def told(figures: Sequence[float], system: float) -> dict[str, float]:
    """Return the least, the median and the system's share of some figures, in µs."""
    return {
        "least": round(min(figures), 1),
        "median": round(statistics.median(figures), 1),
        "system_share": round(system, 2),
    }


def pin(pid: int, cpus: set[int]) -> None:
    """Keep a process, its threads and its children on ``cpus``."""
    for each in processes.tree(pid):
        for task in Path(f"/proc/{each}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cpus)


async def run(rounds: int, phases: Sequence[str], hold_s: float, folder: Path) -> dict[str, Any]:
    """Measure, and return the figures by phase."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(module: str, *arguments: str) -> tuple[Any, Path]:
            log = folder / f"{module}.log"
            argv = gateway_subjects.python(module, *arguments)
            return await stack.enter_async_context(gateway_subjects.process(argv, log)), log

        mock, log = await start("gateway_mock", str(gateway.REPLICAS))
        engines = await gateway_subjects.told(mock, log)
        assert isinstance(engines, list)
        subject = await stack.enter_async_context(gateway_subjects.forebay(engines, folder))
        load = gateway.Load(*await start("gateway_load"))
        first, *others = sorted(os.sched_getaffinity(0))
        if others:
            pin(subject.pid, {first})
            for each in (mock.pid, load.pid):
                pin(each, set(others))
        await gateway.until_ready(load, subject)
        await load.order(subject, **_CLOSED)
        found: dict[str, dict[str, float]] = {}
        for phase in phases:
            order, key = PHASES[phase]
            if hold_s:
                print(f"pid {subject.pid}: {phase} for {hold_s:g} s", file=sys.stderr, flush=True)
                more = {"requests": 10**9, "limit_s": hold_s, "window_s": hold_s}
                await load.order(subject, **{**order, **more})
                continue
            before = processes.times_s(subject.pid)
            figures = [float((await load.order(subject, **order))[key]) for _ in range(rounds)]
            found[phase] = told(figures, split(subject.pid, before))
            print(f"{phase}: {found[phase]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--phases", default=",".join(PHASES), help="with commas")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds, for a profiler")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-cost-") as name:
        phases = asked.phases.split(",")
        print(json.dumps(asyncio.run(run(asked.rounds, phases, asked.hold, Path(name)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
