"""`make bench-gateway`: what a request and a streamed token cost in Forebay and in its peers.

One run, interleaved rounds, the same mock engines and load generator for everybody, each in a process
of its own. The last line is JSON; ``--report FILE`` writes the figures into the report as well.
Needs the environment that ``.ci/bench-env`` makes.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import gateway_report, gateway_subjects, processes

REPLICAS = 4
SUBJECTS = ("direct", "forebay", "vllm_router", "smg", "litellm")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: interleaved rounds.
        serial: requests one after the other, a round.
        closed: requests with 32 under way, a round.
        window_s: seconds in which tokens are counted, a round.
        memory: requests before memory is looked at again.
        limit_s: longest time for one measurement of a subject (LiteLLM needs it).
        memory_limit_s: the same for the memory's requests.
    """

    rounds: int = 7
    serial: int = 500
    closed: int = 4000
    window_s: float = 4.0
    memory: int = 50_000
    limit_s: float = 8.0
    memory_limit_s: float = 75.0


QUICK = Plan(
    rounds=3, serial=200, closed=1500, window_s=2.0, memory=8_000, limit_s=4.0, memory_limit_s=15.0
)


class Load:
    """The load generator's process."""

    def __init__(self, started: asyncio.subprocess.Process, log: Path) -> None:
        self._process = started
        self._log = log

    @property
    def pid(self) -> int:
        """The generator's."""
        return self._process.pid

    async def order(self, subject: gateway_subjects.Subject, **what: Any) -> dict[str, Any]:
        """Have one measurement made."""
        assert self._process.stdin is not None
        order = {
            "address": subject.address,
            "headers": dict(subject.headers),
            "pid": subject.pid,
            **what,
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        said = await gateway_subjects.told(self._process, self._log)
        assert isinstance(said, dict)
        return said


async def until_ready(
    load: Load, subject: gateway_subjects.Subject, timeout_s: float = 180
) -> None:
    """Return once a subject answers."""
    until = time.monotonic() + timeout_s
    while True:
        said = await load.order(subject, do="closed", connections=1, requests=1, limit_s=10)
        if said.get("bad") == 0:
            return
        if time.monotonic() > until:
            raise gateway_subjects.BenchError(f"{subject.name} does not answer: {said}")
        await asyncio.sleep(0.5)


async def measure(
    load: Load, subject: gateway_subjects.Subject, plan: Plan
) -> dict[str, dict[str, Any]]:
    """Return one round's figures of one subject."""
    limit = {"limit_s": plan.limit_s}
    await load.order(subject, do="closed", connections=1, requests=20, **limit)  # warm caches
    return {
        "serial": await load.order(
            subject, do="closed", connections=1, requests=plan.serial, **limit
        ),
        "closed": await load.order(
            subject, do="closed", connections=32, requests=plan.closed, **limit
        ),
        "streams": await load.order(
            subject,
            do="streams",
            connections=subject.streams,
            window_s=plan.window_s,
            limit_s=20.0,
        ),
    }


async def memory(load: Load, subject: gateway_subjects.Subject, plan: Plan) -> dict[str, Any]:
    """Return a subject's memory before and after many requests."""
    start = processes.rss_mb(subject.pid)
    half = {"do": "closed", "connections": 32, "requests": plan.memory // 2}
    first = await load.order(subject, **half, limit_s=plan.memory_limit_s / 2)
    middle = processes.rss_mb(subject.pid)
    second = await load.order(subject, **half, limit_s=plan.memory_limit_s / 2)
    return {
        "start": start,
        "half": middle,
        "end": processes.rss_mb(subject.pid),
        "requests": first["requests"] + second["requests"],
        "bad": first["bad"] + second["bad"],
    }


async def run(plan: Plan, names: Sequence[str], env_dir: Path, folder: Path) -> dict[str, Any]:
    """Start everything, measure, and return the result."""
    async with contextlib.AsyncExitStack() as stack:
        mock_log, load_log = folder / "mock.log", folder / "load.log"
        mock = await stack.enter_async_context(
            gateway_subjects.process(
                gateway_subjects.python("gateway_mock", str(REPLICAS)), mock_log
            )
        )
        engines = await gateway_subjects.told(mock, mock_log)
        assert isinstance(engines, list)
        subjects = [gateway_subjects.Subject("direct", engines[0])]
        for name in names:
            if name == "forebay":
                runs = gateway_subjects.forebay(engines, folder)
            elif name != "direct":
                runs = gateway_subjects.peer(name, env_dir, engines, folder)
            else:
                continue
            subjects.append(await stack.enter_async_context(runs))
        started = await stack.enter_async_context(
            gateway_subjects.process(gateway_subjects.python("gateway_load"), load_log)
        )
        load = Load(started, load_log)
        dropped: dict[str, str] = {}
        for subject in subjects:
            try:
                await until_ready(load, subject)
            except gateway_subjects.BenchError as error:
                if subject.name in ("direct", "forebay"):
                    raise
                dropped[subject.name] = str(error)  # the others can still be compared
                _say(f"left out: {error}")
            else:
                _say(f"{subject.name} {subject.version} answers")
        subjects = [subject for subject in subjects if subject.name not in dropped]
        rounds: dict[str, list[dict[str, dict[str, Any]]]] = {s.name: [] for s in subjects}
        for number in range(plan.rounds):
            turned = subjects[number % len(subjects) :] + subjects[: number % len(subjects)]
            for subject in turned:
                figures = await measure(load, subject, plan)
                rounds[subject.name].append(figures)
                _say(f"round {number + 1}: {subject.name}: {_short(figures)}")
        memories = {s.name: await memory(load, s, plan) for s in subjects if s.pid}
        versions = {s.name: s.version for s in subjects if s.version}
        streams = {s.name: s.streams for s in subjects}
    found = {**summary(rounds), **_memory(memories), "versions": versions, "streams": streams}
    found["rounds"] = rounds
    return {**found, "dropped": dropped}


def summary(rounds: Mapping[str, Sequence[Mapping[str, Mapping[str, Any]]]]) -> dict[str, Any]:
    """Return medians over the rounds, and the ratios to vllm-router round by round."""

    def each(name: str, phase: str, key: str) -> list[float]:
        return [figures[phase][key] for figures in rounds[name]]

    def medians(phase: str, key: str) -> dict[str, float]:
        return {name: round(statistics.median(each(name, phase, key)), 3) for name in rounds}

    def added(name: str, key: str) -> float:
        pairs = zip(each(name, "serial", key), each("direct", "serial", key), strict=True)
        return round(statistics.median(mine - direct for mine, direct in pairs), 3)

    found: dict[str, Any] = {
        "cpu_us_per_request": medians("closed", "cpu_us_per_request"),
        "cpu_us_per_request_serial": medians("serial", "cpu_us_per_request"),
        "added_latency_ms": {
            name: {"p50": added(name, "p50_ms"), "p99": added(name, "p99_ms")} for name in rounds
        },
        "requests_per_s": medians("closed", "requests_per_s"),
        "cpu_us_per_token": medians("streams", "cpu_us_per_token"),
        "tokens_per_s": medians("streams", "tokens_per_s"),
        "bad": {
            name: sum(int(phase["bad"]) for figures in rounds[name] for phase in figures.values())
            for name in rounds
        },
    }
    found["ratios"] = {
        peer: {
            what: _ratio(each("forebay", phase, key), each(peer, phase, key))
            for what, phase, key in (
                ("cpu_per_request", "closed", "cpu_us_per_request"),
                ("cpu_per_token", "streams", "cpu_us_per_token"),
            )
        }
        for peer in rounds
        if "forebay" in rounds and peer not in ("direct", "forebay")
    }
    for peer, ratios in found["ratios"].items():
        mine, theirs = found["added_latency_ms"]["forebay"], found["added_latency_ms"][peer]
        ratios["added_latency_p50"] = {"median": round(mine["p50"] / max(theirs["p50"], 1e-6), 3)}
    return found


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    each = [a / b for a, b in zip(mine, theirs, strict=True) if b]
    if not each:
        return {}
    return {
        "median": round(statistics.median(each), 4),
        "least": round(min(each), 4),
        "most": round(max(each), 4),
    }


def _memory(memories: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rss_mb": {
            name: {key: round(found[key], 1) for key in ("start", "half", "end")}
            for name, found in memories.items()
        },
        "rss_requests": {name: found["requests"] for name, found in memories.items()},
        "rss_bad": {name: found["bad"] for name, found in memories.items()},
    }


def _short(figures: Mapping[str, Mapping[str, Any]]) -> str:
    serial, closed, streams = figures["serial"], figures["closed"], figures["streams"]
    return (
        f"p50 {serial['p50_ms']:.2f} ms, {closed['cpu_us_per_request']:.0f} µs a request, "
        f"{closed['requests_per_s']:.0f}/s, {streams['cpu_us_per_token']:.1f} µs a token"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def prefix_routing(requests: int) -> dict[str, Any]:
    """Run `tests.bench.prefix`, which needs the environments of engines, and return what belongs here too.

    Raises:
        gateway_subjects.BenchError: it failed; what it said stands above.
    """
    order = [".venv/bin/python", "-m", "tests.bench.prefix", "--requests", str(requests)]
    done = subprocess.run(order, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise gateway_subjects.BenchError(f"{' '.join(order)} ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[name] for name in ("prefix_hit_share", "ttft_ms_mean")} | {
        "prefix_versions": found["versions"]
    }


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few minutes, for work in progress")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, with commas")
    parser.add_argument("--env", type=Path, default=Path("build/bench-env"), help="the peers")
    parser.add_argument("--report", type=Path, help="write the tables into this file")
    parser.add_argument(
        "--prefix",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="run bench-prefix with so many requests afterwards, and put its figures beside these",
    )
    asked = parser.parse_args()
    names = [name for name in SUBJECTS if name in asked.only.split(",")]
    if not (asked.env / "bin").exists() and set(names) & set(gateway_subjects.PEERS):
        print(f"{asked.env}: no environment with the peers: run .ci/bench-env", file=sys.stderr)
        return 2
    plan = QUICK if asked.quick else Plan()
    machine = gateway_report.machine()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        try:
            found = asyncio.run(run(plan, names, asked.env.absolute(), Path(name)))
            if asked.prefix:
                found |= prefix_routing(asked.prefix)
        except (gateway_subjects.BenchError, TimeoutError) as error:
            why = (
                str(error) or "a measurement gave no answer: run it again with --only to find whose"
            )
            print(f"bench-gateway: error: {why}", file=sys.stderr)
            return 1
    result = {"machine": machine, "plan": dataclasses.asdict(plan), **found}
    if asked.report:
        gateway_report.write(asked.report, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
