"""Requests over time: a day's curve with bursts and spikes, or a recorded trace."""

import csv
import dataclasses
import datetime
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scheduler.sim import engine, scenario

SLICE_S = 20.0  # the rate is constant for so long
MEMORY_S = 60.0  # bursts are correlated over so long
OPENING_S = 60.0


def calls(
    site: scenario.Scenario, *, seed: int, start_s: float, end_s: float
) -> Iterator[tuple[float, list[engine.Call]]]:
    """Yield one slice after another: its end and its requests by arrival, in seconds since midnight."""
    if site.traffic.trace:
        yield from _replayed(site, start_s, end_s)
        return
    draw = np.random.default_rng(seed)
    traffic = site.traffic
    shares = np.array([model.share for model in site.models])
    spikes = _spikes(site, draw)
    burst = 0.0
    keep = math.exp(-SLICE_S / MEMORY_S)
    at = start_s
    while at < end_s:
        length = min(SLICE_S, end_s - at)
        burst = burst * keep + draw.normal() * traffic.burst * math.sqrt(1 - keep * keep)
        rate = traffic.curve(at % scenario.DAY_S) * math.exp(burst - traffic.burst**2 / 2)
        factors = np.array(
            [
                traffic.spike_factor
                if any(
                    b <= at % scenario.DAY_S < b + traffic.spike_s and w == which for b, w in spikes
                )
                else 1.0
                for which in range(len(site.models))
            ]
        )
        weights = shares * factors
        count = int(draw.poisson(rate * weights.sum() * length))
        yield at + length, _drawn(site, draw, weights / weights.sum(), count, (at, length))
        at += length


def _drawn(
    site: scenario.Scenario,
    draw: np.random.Generator,
    weights: "np.typing.NDArray[np.float64]",
    count: int,
    when: tuple[float, float],
) -> list[engine.Call]:
    traffic = site.traffic
    at = np.sort(draw.uniform(when[0], when[0] + when[1], count))
    which = draw.choice(len(weights), size=count, p=weights)
    prompt = _lengths(draw, count, traffic.prompt, traffic.spread, traffic.prompt_most)
    output = _lengths(draw, count, traffic.output, traffic.spread, traffic.output_most)
    cached = draw.uniform(0, min(1.0, 2 * traffic.cached), count)
    computed = np.maximum(16, (prompt * (1 - cached)).astype(np.int64))
    return [
        engine.Call(m, a, p, c, o)
        for m, a, p, c, o in zip(
            which.tolist(),
            at.tolist(),
            prompt.tolist(),
            computed.tolist(),
            output.tolist(),
            strict=True,
        )
    ]


def _lengths(
    draw: np.random.Generator, count: int, mean: float, spread: float, most: int
) -> "np.typing.NDArray[np.int64]":
    values = draw.lognormal(math.log(mean) - spread**2 / 2, spread, count)
    return np.clip(values, 16 if mean > 16 else 1, most).astype(np.int64)


def _spikes(site: scenario.Scenario, draw: np.random.Generator) -> list[tuple[float, int]]:
    """Return when each spike of the day begins, and which model it is of."""
    served = [number for number, model in enumerate(site.models) if model.share]
    return [
        (float(draw.uniform(0, scenario.DAY_S)), int(draw.choice(served)))
        for _ in range(site.traffic.spikes)
    ]


def _replayed(
    site: scenario.Scenario, start_s: float, end_s: float
) -> Iterator[tuple[float, list[engine.Call]]]:
    rows = read(_path(site))
    served = [number for number, model in enumerate(site.models) if model.share]
    made: list[engine.Call] = []
    for number, row in enumerate(rows):
        at = start_s + row.at_s / site.traffic.speed
        if at >= end_s:
            break
        prompt = min(row.prompt, site.traffic.prompt_most)
        computed = (
            max(16, prompt - row.cached)
            if row.cached >= 0
            else max(16, round(prompt * (1 - site.traffic.cached)))
        )
        output = max(1, min(row.output, site.traffic.output_most))
        made.append(engine.Call(served[number % len(served)], at, prompt, computed, output))
    made.sort(key=lambda call: call.arrival)
    begin = 0
    edge = start_s
    while edge < end_s:
        edge += SLICE_S
        last = begin
        while last < len(made) and made[last].arrival < edge:
            last += 1
        yield edge, made[begin:last]
        begin = last


def opening_rate(site: scenario.Scenario) -> float:
    """Return requests/s in the first minute of a trace as it is replayed: what a running site has seen."""
    rows = read(_path(site))
    span = OPENING_S * site.traffic.speed
    return sum(row.at_s < span for row in rows) / OPENING_S


def _path(site: scenario.Scenario) -> Path:
    path = Path(site.traffic.trace)
    return path if path.is_absolute() or path.exists() else scenario.SHIPPED / path


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace; `cached` are tokens that an endless prefix cache would hold, -1: not known."""

    at_s: float
    prompt: int
    output: int
    cached: int = -1


def read(path: Path) -> list[Row]:
    """Read a trace: Azure's CSV or Mooncake's JSON lines; a last line that was cut is left out.

    Raises:
        scenario.ScenarioError: it is neither, or can't be read.
    """
    try:
        return _azure(path) if path.suffix == ".csv" else _mooncake(path)
    except OSError as error:
        raise scenario.ScenarioError(f"{path}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise scenario.ScenarioError(f"{path}: not a trace that is known: {error}") from error


def _azure(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as lines:
        raw = list(csv.DictReader(lines))
    found = [
        (
            datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for row in raw
    ]
    begin = min(at for at, _, _ in found)
    return [Row((at - begin).total_seconds(), prompt, output) for at, prompt, output in found]


BLOCK = 512  # tokens behind one of Mooncake's hashes


def _mooncake(path: Path) -> list[Row]:
    seen: set[int] = set()
    found: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the published head ends in the middle of a line
        hit = 0
        for block in row["hash_ids"]:
            if block not in seen:
                break
            hit += BLOCK
        seen.update(row["hash_ids"])
        prompt = int(row["input_length"])
        found.append(
            Row(row["timestamp"] / 1000, prompt, int(row["output_length"]), min(hit, prompt))
        )
    return found
