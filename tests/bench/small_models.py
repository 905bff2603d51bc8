"""One-shot requests on real vLLM: one by one, together, and gathered into one request as a batcher would.

``python -m tests.bench.small_models [--rounds 5] [--report docs/bench/models.md]``; JSON on the last line.
One replica for each kind, asked as a gateway asks it. The three ways are interleaved; steps are the engine's.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from engines import tinymodel
from tests.bench import report_marks
from tests.contract import engine_vllm

INPUTS, SEATS, TOKENS = 64, 32, 24
KINDS = {"embed": "/v1/embeddings", "classify": "/v1/classify"}
WAYS = {
    "alone": "one request after the other",
    "together": f"requests of one input, {SEATS} at once",
    "gathered": f"requests of {SEATS} inputs, one after the other",
}
Way = Callable[[], Awaitable[object]]


class Caller:
    """Asks one replica.

    Args:
        replica: which.
        http: its client.
        kind: one of `KINDS`.
    """

    def __init__(self, replica: engine_vllm.Replica, http: httpx.AsyncClient, kind: str) -> None:
        self._replica = replica
        self._http = http
        self._kind = kind
        self._asked = 0

    async def ask(self, count: int) -> None:
        """Ask for ``count`` inputs in one request; no two inputs are equal."""
        given = []
        for _ in range(count):
            self._asked += 1
            given.append([100 + (self._asked * 31 + n * n) % 800 for n in range(TOKENS)])
        who = engine_vllm.identity(self._replica, KINDS[self._kind], model=self._kind)
        answer = await self._http.post(
            KINDS[self._kind],
            json={"model": self._kind, "input": given if count > 1 else given[0]},
            headers={**engine_vllm.headers(who), "Accept": "application/json"},
        )
        if answer.status_code != 200 or len(answer.json()["data"]) != count:
            raise AssertionError(answer.text)

    async def alone(self) -> None:
        """Ask for each input by itself."""
        for _ in range(INPUTS):
            await self.ask(1)

    async def together(self) -> None:
        """Ask for as many single inputs at once as there are seats."""
        left = iter(range(INPUTS))

        async def one() -> None:
            for _ in left:
                await self.ask(1)

        await asyncio.gather(*(one() for _ in range(SEATS)))

    async def gathered(self) -> None:
        """Ask for as many inputs in one request."""
        for _ in range(INPUTS // SEATS):
            await self.ask(SEATS)

    async def steps(self) -> int:
        """Return the engine's steps so far, once it is at rest."""
        said: list[Mapping[str, Any]] = []
        while len(said) < 2 or said[-1] != said[-2] or said[-1]["running"]:
            state = (await self._http.get("/forebay/state")).raise_for_status().json()
            said.append({name: state[name] for name in ("running", "steps_total")})
        return int(said[-1]["steps_total"])


async def measured(caller: Caller, rounds: int) -> dict[str, Any]:
    """Return seconds and steps by way, over interleaved rounds."""
    ways: dict[str, Way] = {name: getattr(caller, name) for name in WAYS}
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    steps: dict[str, list[float]] = {name: [] for name in WAYS}
    for way in ways.values():
        await way()  # the first of each finds nothing warm
    for _ in range(rounds):
        for name, way in ways.items():
            before, began = await caller.steps(), time.monotonic()
            await way()
            rates[name].append(INPUTS / (time.monotonic() - began))
            steps[name].append((await caller.steps() - before) / INPUTS)
    return {
        name: {
            "inputs_per_s": round(statistics.median(rates[name]), 1),
            "least": round(min(rates[name]), 1),
            "most": round(max(rates[name]), 1),
            "steps_an_input": round(statistics.median(steps[name]), 3),
        }
        for name in WAYS
    }


def figures(rounds: int) -> dict[str, Any]:
    """Measure both kinds."""
    found: dict[str, Any] = {"rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-small-") as name:
        server = engine_vllm.ForkServer(engine_vllm.NEWEST, Path(name))
        try:
            for kind in KINDS:
                weights = Path(name) / kind
                make = tinymodel.make if kind == "embed" else tinymodel.make_classifier
                make(weights)
                spec = engine_vllm.spec(
                    Path(name),
                    model=kind,
                    weights=str(weights),
                    seats=SEATS,
                    engine_args={**engine_vllm.ARGUMENTS, "runner": "pooling", "convert": kind},
                )
                begun = engine_vllm.begin(server, spec)
                replica = engine_vllm.listening(server, begun)
                found[kind] = asyncio.run(_asked(replica, kind, rounds))
                engine_vllm.stop(server, begun)
        finally:
            server.close()
    return found


async def _asked(replica: engine_vllm.Replica, kind: str, rounds: int) -> dict[str, Any]:
    secret = {"Authorization": f"Bearer {engine_vllm.SECRET}"}
    async with httpx.AsyncClient(
        base_url=replica.url, headers=secret, timeout=120, trust_env=False
    ) as http:
        return await measured(Caller(replica, http, kind), rounds)


def section(found: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [
        "| model | way | inputs/s, median | least | most | steps an input |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in KINDS:
        for way, told in WAYS.items():
            one = found[kind][way]
            lines.append(
                f"| {kind} | {told} | {one['inputs_per_s']} | {one['least']} | {one['most']} | "
                f"{one['steps_an_input']} |"
            )
    lines += [
        "",
        f"{INPUTS} inputs of {TOKENS} tokens a way, {found['rounds']} interleaved rounds.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", type=Path, default=None, help="page to put the figures into")
    args = parser.parse_args()
    found = figures(args.rounds)
    if args.report is not None:
        report_marks.put(args.report, "small models", section(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
