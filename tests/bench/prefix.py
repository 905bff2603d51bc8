"""`make bench-prefix`: which router finds the prefixes that real vLLM replicas hold, and what that is worth.

Every arm has three vLLM replicas of its own (CPU, tiny model, forked from one fork server), so that each
has its own caches from beginning to end; the arms take turns on slices of the same requests, one at a time,
so that a busy machine is as busy for all. `random` and `round_robin` are the load generator's own choice and
cost no router at all. The oracle is `prefix_replay`'s: infinite caches, the same bound on the load. The last
line is JSON.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench import gateway_subjects, prefix_forebay, prefix_replay
from tests.bench import prefix_workload as workload
from tests.contract import engine_vllm

REPLICAS, SEATS = 3, 16
ARMS = ("random", "round_robin", "vllm_router", "forebay", "forebay_events")


@dataclasses.dataclass
class Tally:
    """What an arm has got so far."""

    prompt: int = 0
    cached: int = 0
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    failed: int = 0
    by_slice: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return the arm's figures."""
        ranked = sorted(self.ttft_ms)
        return {
            "hit_share": self.cached / max(1, self.prompt),
            "ttft_ms_mean": statistics.mean(ranked),
            "ttft_ms_p95": ranked[int(0.95 * (len(ranked) - 1))],
            "ttft_ms_slices_stdev": statistics.pstdev(self.by_slice),
            "failed": self.failed,
        }


@dataclasses.dataclass(frozen=True)
class Arm:
    """Where an arm's requests go: one address, or several to choose from."""

    name: str
    addresses: Sequence[str]
    token: str


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
        if arm.name == "random":
            return self._draws.choice(arm.addresses)
        self._turn += 1
        return arm.addresses[self._turn % len(arm.addresses)]

    async def _one(self, arm: Arm, row: workload.Request, tally: Tally) -> None:
        body = {
            "model": "chat",
            "prompt": row.text,
            "max_tokens": row.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"http://{self._address(arm)}/v1/completions"
        headers = {"Authorization": f"Bearer {arm.token}"}
        began, first, usage = time.perf_counter(), 0.0, None
        async with self._session.post(url, json=body, headers=headers) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter() - began
                if b'"usage":{' in line:
                    usage = json.loads(line[6:]).get("usage")
        if answer.status != 200 or not usage:
            tally.failed += 1
            return
        tally.prompt += usage["prompt_tokens"]
        tally.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tally.ttft_ms.append(first * 1000)


def replicas(
    server: engine_vllm.ForkServer, folder: Path, blocks: int
) -> list[engine_vllm.Replica]:
    """Start an arm's replicas."""
    arguments = {
        "enforce-eager": True,
        "dtype": "float32",
        "block-size": workload.BLOCK_TOKENS,
        "kv-cache-memory-bytes": blocks * workload.BLOCK_BYTES,
    }
    spec = engine_vllm.spec(folder, seats=SEATS, reserved_seats=0, engine_args=arguments)
    names = [engine_vllm.begin(server, spec) for _ in range(REPLICAS)]
    return [engine_vllm.listening(server, name) for name in names]


@contextlib.asynccontextmanager
async def started(
    name: str, engines: Sequence[engine_vllm.Replica], folder: Path, env_dir: Path
) -> AsyncIterator[Arm]:
    """Run what an arm needs before its replicas."""
    addresses = [engine.address for engine in engines]
    if name.startswith("forebay"):
        home = folder / name
        home.mkdir()
        argv = gateway_subjects.python(
            "prefix_forebay", str(home), str(folder / "secret"), str(SEATS), *addresses
        )
        env = {}
        if name == "forebay_events":
            env[prefix_forebay.ENDPOINTS] = ",".join(
                f"ipc://{folder}/events/{engine.pid}" for engine in engines
            )
        async with gateway_subjects.process(argv, folder / f"{name}.log", env) as process:
            said: Any = await gateway_subjects.told(process, folder / f"{name}.log")
            yield Arm(name, [said["http"].removeprefix("http://")], said["token"])
    elif name == "vllm_router":
        port = gateway_subjects.free_port()
        argv = [
            str(env_dir / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
            "--policy", "cache_aware", "--log-level", "warning", "--api-key", engine_vllm.SECRET,
            "--prometheus-port", str(gateway_subjects.free_port()),
            "--worker-urls", *[f"http://{address}" for address in addresses],
        ]  # fmt: skip
        async with gateway_subjects.process(argv, folder / f"{name}.log"):
            await _answers(f"127.0.0.1:{port}")
            yield Arm(name, [f"127.0.0.1:{port}"], engine_vllm.SECRET)
    else:
        yield Arm(name, addresses, engine_vllm.SECRET)


async def _answers(address: str) -> None:
    """Wait until a router takes connections."""
    host, _, port = address.rpartition(":")
    for _ in range(600):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise gateway_subjects.BenchError(f"{address} takes no connection")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every arm and return the result."""
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
                    await stack.enter_async_context(started(arm, engines[arm], folder, options.env))
                    for arm in options.arms
                ]
                load = Load(session, options.at_once)
                for number, part in enumerate(slices):
                    for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                        await load.send(arm, part, tallies[arm.name])
                    print(_line(number, len(slices), tallies), flush=True)
        finally:
            server.close()
    return _result(options, rows, tallies)


def _line(number: int, of: int, tallies: dict[str, Tally]) -> str:
    words = (
        f"{name} {tally.cached / max(1, tally.prompt):.1%} {statistics.mean(tally.ttft_ms or [0]):.1f} ms"
        for name, tally in tallies.items()
    )
    return f"slice {number + 1}/{of}: " + ", ".join(words)


def _result(
    options: argparse.Namespace, rows: Sequence[workload.Request], tallies: dict[str, Tally]
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
    parser.add_argument("--at-once", type=int, default=6, help="requests under way")
    parser.add_argument("--blocks", type=int, default=8000, help="KV blocks of each replica")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--env", type=Path, default=Path("build/bench-env"), help="vllm-router's")
    result = asyncio.run(run(parser.parse_args(words)))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
