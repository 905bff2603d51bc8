"""`make bench-calibration`: does the simulator's engine say what real vLLM does on this machine?

One run fits and judges. Equal requests at once and prompts alone give the step time t = a + b*prefill +
c*decode + d*KV and what a request costs outside the engine. Three loads of other kinds are judged: the
simulator's engine is given the same requests at the same times. They are measured in turns, each judged load
right after what is fitted, and medians over all rounds are compared, so that a machine that is slow for a
minute is slow for both. Prompts have up to 800 tokens: beyond, attention makes the tiny model's prefill
dearer with every token, which a linear model does not say. The last line is JSON.
"""

import argparse
import asyncio
import collections
import dataclasses
import itertools
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from engines.tinymodel import VOCABULARY
from scheduler.core import sizing
from scheduler.sim import engine
from tests.bench import report_marks
from tests.contract import engine_vllm

SEATS = 8
CHUNK = 1024
KV_TOKENS = 40_000  # 64 MiB at 1,536 bytes a token, less what vLLM keeps
WITHIN = 0.2
ARGUMENTS = {
    **engine_vllm.ARGUMENTS,
    "kv-cache-memory-bytes": "64M",
    "max-num-batched-tokens": CHUNK,
}
DECODING = ((1, 32), (3, 32), (8, 32), (8, 600))  # sequences at once, prompt tokens
TOKENS = 64  # that each of them samples
PROMPTS = (50, 200, 400, 600, 800)


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One request: seconds from the load's begin, tokens."""

    at_s: float
    prompt: int
    output: int


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests; `most` run at once. `closed`: one is sent when another has ended, and waits for nothing."""

    asks: tuple[Ask, ...]
    most: int = SEATS
    closed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One answer: seconds from the load's begin. `tokens`: when each one came, where that was watched."""

    sent: float
    first: float
    end: float
    output: int
    tokens: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What a round has fitted; `overhead_s` is spent outside the engine before the first token."""

    step: sizing.StepTime
    overhead_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What is compared."""

    ttft_ms: float
    ttft_p90_ms: float
    tokens_per_s: float

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> "Figures":
        """Sum up a load's answers."""
        waits = sorted((each.first - each.sent) * 1000 for each in seen)
        span = max(each.end for each in seen) - min(each.sent for each in seen)
        p90 = waits[min(len(waits) - 1, math.ceil(0.9 * len(waits)) - 1)]
        return cls(statistics.median(waits), p90, sum(each.output for each in seen) / span)


def predict(load: Load, fit: Fit) -> list[Seen]:
    """Return what the simulator's engine makes of a load."""
    one = engine.Engine(
        fit.step,
        kv_tokens=KV_TOKENS,
        seats=SEATS,
        chunk=CHUNK,
        itl_s=1.0,
        shape=engine.BatchShape(1.0, 1.0),
    )
    waiting = collections.deque(load.asks)
    coming: collections.deque[tuple[float, engine.Call]] = collections.deque()
    held, now = 0, 0.0
    found: list[Seen] = []
    while waiting or coming or one.running:
        while waiting and held < load.most and waiting[0].at_s <= now:
            ask = waiting.popleft()
            sent = now if load.closed else ask.at_s
            held += 1
            call = engine.Call(0, sent, ask.prompt, ask.prompt, ask.output)
            coming.append((now + fit.overhead_s, call))
        next_ask = waiting[0].at_s if waiting and held < load.most else math.inf
        enters = coming[0][0] if coming else math.inf
        now = min(next_ask, enters, one.next_at)
        if enters <= now:
            one.add(coming.popleft()[1], now)
        elif one.next_at <= now:
            done = one.pop(now)
            if done is not None and done[1]:
                held -= 1
                found.append(Seen(done[0].arrival, done[0].first, now, done[0].output))
    return found


class Measured:
    """What the rounds have measured to fit from: ms by (sequences, prompt) and TTFT in ms by prompt."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], list[float]] = {}
        self.alone: dict[int, list[float]] = {}

    def fit(self) -> Fit:
        """Fit a, c and d to the median steps, b and what is outside the engine to the median TTFTs.

        Relative errors are what is made small, and no coefficient is negative.
        """
        steps = {load: statistics.median(each) for load, each in self.steps.items()}
        rows = [(1.0, count, count * (prompt + TOKENS / 2)) for count, prompt in steps]
        base, decode, kv = _least_squares(rows, list(steps.values()))
        waits = {prompt: statistics.median(each) for prompt, each in self.alone.items()}
        cut, prefill = _least_squares([(1.0, prompt) for prompt in waits], list(waits.values()))
        return Fit(sizing.StepTime(base, prefill, decode, kv), max(0.0, cut - base) / 1000)


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients with the least relative errors; those that would be negative are 0."""
    used = list(range(len(rows[0])))
    while True:
        scaled = np.array(
            [[row[n] / value for n in used] for row, value in zip(rows, values, strict=True)]
        )
        found = np.linalg.lstsq(scaled, np.ones(len(values)), rcond=None)[0]
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    whole = [0.0] * len(rows[0])
    for n, value in zip(used, found, strict=True):
        whole[n] = float(value)
    return whole


def steps_of(seen: Sequence[Seen]) -> list[float]:
    """Return the ms of each step in which every one of ``seen`` decodes.

    A step's end is the median of the moments at which its tokens came.
    """
    begin, end = max(each.first for each in seen), min(each.end for each in seen)
    tracks = [[at for at in each.tokens if begin <= at <= end] for each in seen]
    ends = [statistics.median(moments) for moments in zip(*tracks, strict=False)]
    return [(after - before) * 1000 for before, after in itertools.pairwise(ends)]


def judged(fit: Fit) -> dict[str, Load]:
    """Return the three loads that are judged, none of which is fitted; ``fit`` says how much is half."""
    draw = random.Random(5)

    def asks(count: int, rate: float = math.inf) -> tuple[Ask, ...]:
        at, made = 0.0, []
        for _ in range(count):
            made.append(Ask(at, draw.randint(40, 800), draw.randint(12, 72)))
            at += draw.expovariate(rate) if math.isfinite(rate) else 0.0
        return tuple(made)

    whole = Load(asks(40), closed=True)
    takes = len(whole.asks) / max(each.end for each in predict(whole, fit))
    return {
        "two streams": Load(asks(14), most=2, closed=True),
        "half of what it takes": Load(asks(30, takes / 2)),
        "forty at once": Load(asks(40)),
    }


class Subject:
    """A real vLLM replica under load."""

    def __init__(self, replica: engine_vllm.Replica, session: aiohttp.ClientSession) -> None:
        self._url = f"{replica.url}/v1/completions"
        self._session = session
        self._draw = random.Random(11)

    async def run(self, load: Load) -> list[Seen]:
        """Send a load and return its answers."""
        gate = asyncio.Semaphore(load.most)
        begin = time.perf_counter()

        async def one(ask: Ask) -> Seen:
            await asyncio.sleep(max(0.0, begin + ask.at_s - time.perf_counter()))
            async with gate:
                sent = time.perf_counter() if load.closed else begin + ask.at_s
                moments = await self._stream(ask)
            shifted = tuple(at - begin for at in moments)
            return Seen(sent - begin, shifted[0], shifted[-1], ask.output, shifted)

        return list(await asyncio.gather(*(one(ask) for ask in load.asks)))

    async def _stream(self, ask: Ask) -> list[float]:
        """Return when each token came."""
        body = {
            "model": "chat",
            # No two prompts share a block: the prefix cache is not what is measured here.
            "prompt": [self._draw.randrange(16, VOCABULARY) for _ in range(ask.prompt)],
            "max_tokens": ask.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        found: list[float] = []
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"vLLM answers {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    found += [time.perf_counter()] * len(choices[0].get("token_ids") or ())
        if len(found) != ask.output:
            raise RuntimeError(f"{len(found)} tokens came, {ask.output} were asked for")
        return found


async def fit_loads(subject: Subject, into: Measured) -> None:
    """Measure what is fitted from: equal requests at once, and prompts alone."""
    for count, prompt in DECODING:
        seen = await subject.run(Load((Ask(0.0, prompt, TOKENS),) * count))
        # The mean of a burst, since answers end after the sum of their steps; medians are over bursts.
        into.steps.setdefault((count, prompt), []).append(statistics.fmean(steps_of(seen)))
    for prompt in PROMPTS * 2:
        (one,) = await subject.run(Load((Ask(0.0, prompt, 1),)))
        into.alone.setdefault(prompt, []).append((one.first - one.sent) * 1000)


async def measure(replica: engine_vllm.Replica, rounds: int) -> dict[str, Any]:
    """Run the rounds and return the figures."""
    headers = {"Authorization": f"Bearer {engine_vllm.SECRET}"}
    timeout = aiohttp.ClientTimeout(total=600)
    found: dict[str, list[Figures]] = {}
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as session:
        subject = Subject(replica, session)
        await fit_loads(subject, Measured())  # the engine's first steps are slower
        guessed, fitted = Measured(), Measured()
        await fit_loads(subject, guessed)
        loads = judged(guessed.fit())
        for _ in range(rounds):
            for name, load in loads.items():
                await fit_loads(subject, fitted)
                found.setdefault(name, []).append(Figures.of(await subject.run(load)))
    fit = fitted.fit()
    predicted = {name: Figures.of(predict(load, fit)) for name, load in loads.items()}
    return summed(fit, predicted, found)


def summed(
    fit: Fit, predicted: Mapping[str, Figures], measured: Mapping[str, Sequence[Figures]]
) -> dict[str, Any]:
    """Return prediction and median measurement of each load, and whether they are within a fifth."""
    loads = {
        name: {
            figure: _compared(
                getattr(one, figure), [getattr(each, figure) for each in measured[name]]
            )
            for figure in ("ttft_ms", "ttft_p90_ms", "tokens_per_s")
        }
        for name, one in predicted.items()
    }
    return {
        "rounds": min(len(each) for each in measured.values()),
        "fit": {**dataclasses.asdict(fit.step), "overhead_ms": fit.overhead_s * 1000},
        "loads": loads,
        "agrees": all(
            abs(each[figure]["ratio"] - 1) <= WITHIN
            for each in loads.values()
            for figure in ("ttft_ms", "tokens_per_s")
        ),
    }


def _compared(predicted: float, measured: Sequence[float]) -> dict[str, float]:
    middle = statistics.median(measured)
    return {
        "predicted": round(predicted, 1),
        "measured": round(middle, 1),
        "least": round(min(measured), 1),
        "most": round(max(measured), 1),
        "ratio": round(predicted / middle, 3),
    }


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """Start vLLM, run the rounds, stop it."""
    server = engine_vllm.ForkServer(engine_vllm.NEWEST, folder)
    try:
        wanted = engine_vllm.spec(folder, seats=SEATS, reserved_seats=0, engine_args=ARGUMENTS)
        replica = engine_vllm.listening(server, engine_vllm.begin(server, wanted))
        try:
            return asyncio.run(measure(replica, rounds))
        finally:
            engine_vllm.stop(server, replica.id, signal.SIGKILL)
    finally:
        server.close()


def section(said: dict[str, Any]) -> str:
    """Return the figures as a part of the simulation's page."""
    fit = said["fit"]
    rows = [
        "| load | figure | simulated | vLLM, median (least to most) | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    names = {"ttft_ms": "TTFT p50 ms", "ttft_p90_ms": "TTFT p90 ms", "tokens_per_s": "tokens/s"}
    for load, figures in said["loads"].items():
        for figure, each in figures.items():
            rows.append(
                f"| {load} | {names[figure]} | {each['predicted']:g} | {each['measured']:g} "
                f"({each['least']:g} to {each['most']:g}) | {each['ratio']:.2f} |"
            )
    return "\n".join(
        [
            f"{said['rounds']} rounds on {os.cpu_count()} CPUs, {platform.machine()}; the fit: "
            f"a {fit['base']:.2f} ms a step, b {fit['prefill']:.4f} ms a prompt token, "
            f"c {fit['decode']:.3f} ms a sequence, d {fit['kv'] * 1000:.3f} µs a KV token, "
            f"{fit['overhead_ms']:.1f} ms a request outside the engine.",
            "",
            *rows,
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns 0 if simulator and vLLM agree."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--report", type=Path, help="write the section of this page")
    asked = options.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="forebay-calibration-") as folder:
        said = run(Path(folder), asked.rounds)
    if asked.report is not None:
        report_marks.put(asked.report, "calibration", section(said))
    print(section(said))
    print(json.dumps(said))
    return int(not said["agrees"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
