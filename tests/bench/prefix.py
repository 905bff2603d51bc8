"""`make bench-prefix`: which router finds the prefixes that real vLLM replicas hold, and what that is worth.

Every arm has three vLLM replicas of its own (CPU, tiny model, forked from one fork server), so that each
has its own caches from beginning to end; the arms take turns on slices of the same requests, one at a time,
so that a busy machine is as busy for all. Each of the four has a router before its replicas: `random`,
`round_robin` and `vllm_router` are vllm-router with one of its policies each. Engines run at a lower priority
than routers and callers, which share no cores with them on a cluster. The oracle is `prefix_replay`'s:
infinite caches, the same bound on the load. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.bench import gateway_subjects, prefix_replay, prefix_report, report_marks
from tests.bench import prefix_workload as workload
from tests.bench.prefix_arms import ARMS, REPLICAS, Arm, replicas, started
from tests.contract import engine_vllm

_GATEWAY = {
    "forebay_queue_wait_seconds": "gateway_dispatched_ms",
    "forebay_time_to_first_token_seconds": "gateway_first_ms",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Got:
    """What one request got."""

    prompt: int
    cached: int
    ttft_ms: float
    whole_ms: float


@dataclasses.dataclass
class Tally:
    """What an arm has got so far."""

    prompt: int = 0
    cached: int = 0
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    whole_ms: list[float] = dataclasses.field(default_factory=list)
    failed: int = 0
    by_slice: list[float] = dataclasses.field(default_factory=list)

    def add(self, got: Got | None) -> None:
        """Count one request; None: it failed."""
        if got is None:
            self.failed += 1
            return
        self.prompt += got.prompt
        self.cached += got.cached
        self.ttft_ms.append(got.ttft_ms)
        self.whole_ms.append(got.whole_ms)

    def summary(self) -> dict[str, float]:
        """Return the arm's figures."""
        ranked = sorted(self.ttft_ms)
        return {
            "hit_share": self.cached / max(1, self.prompt),
            "ttft_ms_mean": statistics.mean(ranked),
            "ttft_ms_p95": ranked[int(0.95 * (len(ranked) - 1))],
            "ttft_ms_slices_stdev": statistics.pstdev(self.by_slice),
            "whole_ms_mean": statistics.mean(self.whole_ms),
            "failed": self.failed,
        }


class Load:
    """Sends requests in order, so many at a time."""

    def __init__(self, session: aiohttp.ClientSession, at_once: int) -> None:
        self._session = session
        self._at_once = at_once
        self._draws = random.Random(3)
        self._turn = 0

    async def send(self, arm: Arm, rows: Sequence[workload.Request], tally: Tally) -> None:
        """Send ``rows`` to ``arm`` and add to ``tally``."""
        left = iter(rows)
        before = len(tally.ttft_ms)

        async def worker() -> None:
            for row in left:
                await self._one(arm, row, tally)

        await asyncio.gather(*(worker() for _ in range(self._at_once)))
        tally.by_slice.append(statistics.mean(tally.ttft_ms[before:] or [0.0]))

    def _address(self, arm: Arm) -> str:
        if arm.name == "random_direct":
            return self._draws.choice(arm.addresses)
        self._turn += 1
        return arm.addresses[self._turn % len(arm.addresses)]

    async def _one(self, arm: Arm, row: workload.Request, tally: Tally) -> None:
        if arm.chooser is None:
            tally.add(await self._asked(arm, self._address(arm), row))
            return
        address, placed = arm.chooser.place(row)
        with placed.guard:
            got = await self._asked(arm, address, row, placed.guard.prefilled)
            if got is not None:
                arm.chooser.returned(placed, got.prompt, got.cached)
        tally.add(got)

    async def _asked(
        self,
        arm: Arm,
        address: str,
        row: workload.Request,
        first: Callable[[], None] = lambda: None,
    ) -> Got | None:
        """Return what a request got, None where it failed; ``first`` is called at its first token."""
        body = {
            "model": "chat",
            "prompt": row.text,
            "max_tokens": row.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {arm.token}"}
        began, first_s, usage = time.perf_counter(), 0.0, None
        url = f"http://{address}/v1/completions"
        async with self._session.post(url, json=body, headers=headers) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if not first_s:
                    first_s = time.perf_counter() - began
                    first()
                if b'"usage":{' in line:
                    usage = json.loads(line[6:]).get("usage")
        if answer.status != 200 or not usage:
            return None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Got(
            usage["prompt_tokens"], cached, first_s * 1000, (time.perf_counter() - began) * 1000
        )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every arm and return the result."""
    task = asyncio.current_task()
    if task is not None:  # a bench that is ended must leave no process
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    rows = workload.load(options.requests)
    slices = [rows[n : n + options.slice] for n in range(0, len(rows), options.slice)]
    tallies = {name: Tally() for name in options.arms}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        (folder / "events").mkdir()
        os.environ["FOREBAY_BENCH_EVENTS"] = str(folder / "events")
        server = engine_vllm.ForkServer(engine_vllm.NEWEST, folder, "tests.bench.prefix_forkserver")
        try:
            engines = {arm: replicas(server, folder, options.blocks) for arm in options.arms}
            print(f"{REPLICAS * len(options.arms)} vLLM replicas listen", flush=True)
            async with contextlib.AsyncExitStack() as stack:
                limit = aiohttp.ClientTimeout(total=120)
                session = await stack.enter_async_context(
                    aiohttp.ClientSession(
                        trust_env=False, timeout=limit, read_bufsize=1 << 20,
                        connector=aiohttp.TCPConnector(limit=0),
                    )
                )  # fmt: skip
                arms = [
                    await stack.enter_async_context(
                        started(arm, engines[arm], folder, options.env, options.blocks)
                    )
                    for arm in options.arms
                ]
                load = Load(session, options.at_once)
                until = time.monotonic() + options.seconds
                sent = 0
                for number, part in enumerate(slices):
                    if number and time.monotonic() > until:
                        break
                    sent += len(part)
                    for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                        await load.send(arm, part, tallies[arm.name])
                    print(_line(number, len(slices), tallies), flush=True)
                clocks = {arm.name: engine_clock(folder / "events", arm.pids) for arm in arms}
                for arm in arms:
                    if arm.name == "forebay":
                        clocks[arm.name] |= await gateway_clock(session, arm)
        finally:
            server.close()
    return _result(options, rows[:sent], tallies, clocks)


def engine_clock(folder: Path, pids: Sequence[int]) -> dict[str, float]:
    """Return what an arm's engines measured themselves: means of `prefix_forkserver`'s lines, in ms."""
    found: dict[str, list[float]] = {"first_ms": [], "queued_ms": [], "prefill_ms": []}
    for pid in pids:
        path = folder / f"{pid}.times"
        for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
            for name, value in json.loads(line).items():
                found[name].append(value)
    return {name: round(statistics.mean(values or [0.0]), 2) for name, values in found.items()} | {
        "busiest": max(_requests(folder, pid) for pid in pids) / max(1, len(found["queued_ms"]))
    }


async def gateway_clock(session: aiohttp.ClientSession, arm: Arm) -> dict[str, float]:
    """Return the gateway's own means: ms from a request's arrival to its dispatch, and to its first token."""
    headers = {"Authorization": f"Bearer {arm.token}"}
    async with session.get(f"http://{arm.addresses[0]}/metrics", headers=headers) as answer:
        text = await answer.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in _GATEWAY:
            total = dict.fromkeys(("sum", "count"), 0.0)
            for sample in family.samples:
                part = sample.name.rpartition("_")[2]
                if part in total:
                    total[part] += sample.value
            found[_GATEWAY[family.name]] = round(1000 * total["sum"] / max(1, total["count"]), 2)
    return found


def _requests(folder: Path, pid: int) -> int:
    path = folder / f"{pid}.times"
    return path.read_text(encoding="ascii").count("queued_ms") if path.exists() else 0


def _line(number: int, of: int, tallies: dict[str, Tally]) -> str:
    words = (
        f"{name} {tally.cached / max(1, tally.prompt):.1%} {statistics.mean(tally.ttft_ms or [0]):.1f} ms"
        for name, tally in tallies.items()
    )
    return f"slice {number + 1}/{of}: " + ", ".join(words)


def _result(
    options: argparse.Namespace,
    rows: Sequence[workload.Request],
    tallies: dict[str, Tally],
    clocks: dict[str, dict[str, float]],
) -> dict[str, Any]:
    arms = {name: tally.summary() for name, tally in tallies.items()}
    engine = prefix_replay.Engine(replicas=REPLICAS, blocks=options.blocks, at_once=options.at_once)
    modelled = {arm: prefix_replay.replay(rows, arm, engine) for arm in prefix_replay.ARMS}
    oracle = modelled["oracle"].hit_share
    return {
        "prefix_hit_share": {
            **{name: round(each["hit_share"], 4) for name, each in arms.items()},
            "oracle": round(oracle, 4),
        },
        "ttft_ms_mean": {name: round(each["ttft_ms_mean"], 2) for name, each in arms.items()},
        "ttft_ms_p95": {name: round(each["ttft_ms_p95"], 2) for name, each in arms.items()},
        "ttft_ms_slices_stdev": {
            name: round(each["ttft_ms_slices_stdev"], 2) for name, each in arms.items()
        },
        "whole_ms_mean": {name: round(each["whole_ms_mean"], 2) for name, each in arms.items()},
        "engine": clocks,
        "failed": {name: each["failed"] for name, each in arms.items()},
        "of_oracle": {
            name: round(each["hit_share"] / oracle, 4) for name, each in arms.items() if oracle
        },
        "replayed_hit_share": {arm: round(got.hit_share, 4) for arm, got in modelled.items()},
        "requests": len(rows),
        "blocks": options.blocks,
        "at_once": options.at_once,
        "versions": {
            "vllm": engine_vllm.NEWEST,
            "vllm_router": gateway_subjects.peer_version("vllm_router", options.env),
        },
        "load_average": os.getloadavg()[0],
    }


def main(words: Sequence[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="bench-prefix", description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--slice", type=int, default=100, help="requests before the next arm's turn"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="begin no slice after so long; the first always",
    )
    parser.add_argument("--report", type=Path, help="put the figures into this page")
    parser.add_argument("--at-once", type=int, default=6, help="requests under way")
    parser.add_argument("--blocks", type=int, default=8000, help="KV blocks of each replica")
    parser.add_argument("--arms", nargs="+", default=ARMS[:4], choices=ARMS)
    parser.add_argument("--env", type=Path, default=Path("build/bench-env"), help="vllm-router's")
    options = parser.parse_args(words)
    result = asyncio.run(run(options))
    if options.report is not None:
        report_marks.put(options.report, "prefix", prefix_report.tables(result))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
