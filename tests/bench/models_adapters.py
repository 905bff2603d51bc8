"""Adapters on a whole installation: many more than fit, over two replicas of a base. For `make bench-models`.

``python -m tests.bench.models_adapters [--adapters 20]``; JSON on the last line. `forebay up` on the embedded
Slurm with real vLLM. Each adapter is asked alone first, which finds it cold; then all at once, in an order of
chance, beside the base model: answers must be those that were given alone. At last, one that is loaded is
asked in turn with the base, to see what an adapter adds to a request.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from engines import tinymodel
from tests.contract import engine_vllm
from tests.integration.whole import running, waiting

ADAPTERS, SLOTS, REPLICAS = 20, 4, 2
TOKENS = 12
START_S = 600.0
_BASE = """
[[models]]
name = "{name}"
seats = 8
reserved_seats = 1
max_context = 1024
gpus = 1
itl_slo_ms = 1000
replicas = {replicas}
adapter_slots = {slots}
"""
_VLLM = """weights = "{weights}"
[models.engine_args]
dtype = "float32"
enforce-eager = true
kv-cache-memory-bytes = 33554432
"""
_SIMULATED = """engine = "simulated"
engine_args = {"step-base-ms" = 5.0, "adapter-load-ms" = 30.0}
"""


class House(running.Running):
    """An installation whose one model takes adapters.

    Args:
        folder: everything goes there; adapters in a folder of it.
        slurm: the [slurm] table.
        more: `running.Running`'s other arguments.
        real: vLLM; else the simulated engine.
        slots: adapters that each replica takes.
        replicas: of the model.
    """

    def __init__(
        self,
        folder: Path,
        slurm: Mapping[str, Any],
        *more: Any,
        real: bool,
        slots: int = SLOTS,
        replicas: int = REPLICAS,
    ) -> None:
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        model = _BASE.format(name=running.MODEL, replicas=replicas, slots=slots)
        if real:
            tinymodel.main([str(folder / "tiny")])
            model += _VLLM.format(weights=folder / "tiny")
        else:
            model += _SIMULATED
        scheduler = {"adapter_folders": [str(self.adapters)], "ttft_slo_ms": 20_000.0}
        super().__init__(folder, slurm, *more, scheduler=scheduler, models=model, replicas=replicas)
        if real:
            python = json.dumps(str(engine_vllm.python(engine_vllm.NEWEST)))
            text = self.config_file.read_text()
            text = text.replace("[engines]\n", f"[engines]\nvllm_python = {python}\n", 1)
            self.config_file.write_text(text)

    def settled(self, within_s: float = START_S) -> None:
        """Wait until both replicas serve; a busy machine takes minutes to import vLLM."""
        super().settled(max(within_s, START_S))

    def _settled(self) -> bool:
        try:
            assert len(self.replicas()) == self.size, self.replicas()
        except (httpx.TransportError, FileNotFoundError) as error:
            raise AssertionError(f"the gateway does not answer: {error}") from error
        return True

    def declare(self, name: str, seed: int, **fields: Any) -> Path:
        """Make an adapter and register it."""
        folder = self.adapters / name
        tinymodel.make_lora(folder, seed=seed)
        spec = {"path": str(folder), **fields}
        body = {"model": running.MODEL, "name": name, "spec": spec}
        self.call("POST", "/admin/catalog/adapter", body)
        return folder

    def loaded(self) -> dict[str, int]:
        """Return how many replicas have each adapter."""
        found = self.call("GET", "/admin/catalog/adapters")["models"].get(running.MODEL, {})
        return {
            name: sum(state == "loaded" for state in (one or {"states": {}})["states"].values())
            for name, one in found.items()
        }

    def ask(self, model: str, tokens: int = TOKENS, **fields: Any) -> tuple[str, float]:
        """Return an answer and its seconds."""
        began = time.monotonic()
        answer = self.client.post(
            f"{self.http}/v1/completions",
            json={"model": model, "prompt": "The river", "max_tokens": tokens, "temperature": 0}
            | fields,
            headers={"Authorization": f"Bearer {self.key}"},
        )
        took = time.monotonic() - began
        assert answer.status_code == 200, f"{model}: {answer.status_code} {answer.text}"
        return str(answer.json()["choices"][0]["text"]), took

    def changes(self) -> list[str]:
        """Return what came to replicas and went, the newest last."""
        found: list[str] = self.call("GET", "/admin/catalog/adapters")["changes"]
        return found


def measure(house: House, count: int, rounds: int) -> dict[str, Any]:
    """Run it all on an installation that is up; returns the figures."""
    names = [f"a{number:02}" for number in range(count)]
    for number, name in enumerate(names):
        house.declare(name, 100 + number)
    models = [running.MODEL, *[f"{running.MODEL}:{name}" for name in names]]
    waiting.eventually(
        lambda: len(house.loaded()) == count and len(house.call("GET", "/v1/models")["data"]) == count + 1,
        "all adapters known", 30.0,
    )  # fmt: skip
    house.ask(running.MODEL)
    alone = {running.MODEL: house.ask(running.MODEL)[0]}
    cold: list[float] = []
    for model in models[1:]:
        _, took = house.ask(model, 1)
        cold.append(took)
        alone[model] = house.ask(model)[0]
    wrong = _together(house, alone, rounds)
    warm = _warm(house, models[-1], 15)
    replicas = house.replicas()
    held = [len(each["adapters"]) for each in replicas]
    load_ms = [one["load_ms"] for each in replicas for one in each["adapters"]]
    return {
        "adapters": count,
        "slots": SLOTS,
        "replicas": len(replicas),
        "distinct": len(set(alone.values())),
        "requests": len(models) * rounds,
        "wrong": wrong,
        "evictions": sum(" goes from " in line for line in house.changes()),
        "held": held,
        "adapter_load_ms": {
            "cold": _spread([1000 * value for value in cold]),
            "warm": _spread([1000 * value for value in warm]),
            "engine": _spread(load_ms),
        },
    }


def _together(house: House, alone: Mapping[str, str], rounds: int) -> list[str]:
    """Ask for all at once; returns what was answered otherwise than alone."""
    asked = [model for model in alone for _ in range(rounds)]
    random.Random(7).shuffle(asked)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda model: house.ask(model)[0], asked))
    return [
        f"{model}: {text!r} instead of {alone[model]!r}"
        for model, text in zip(asked, found, strict=True)
        if text != alone[model]
    ]


def _warm(house: House, model: str, pairs: int) -> list[float]:
    """Return the seconds that a loaded adapter adds to a request, pair by pair with the base."""
    house.ask(model, 1)
    house.ask(running.MODEL, 1)
    return [house.ask(model, 1)[1] - house.ask(running.MODEL, 1)[1] for _ in range(pairs)]


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "least": round(min(values), 1),
        "most": round(max(values), 1),
    }


def figures(count: int = ADAPTERS, rounds: int = 3) -> dict[str, Any]:
    """Return the figures of an installation of their own, on the embedded Slurm."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-adapters-") as name:
        house = House(Path(name), {"client": "embedded"}, real=True)
        try:
            house.up()
            return measure(house, count, rounds)
        finally:
            house.close()


def section(found: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    times = found["adapter_load_ms"]
    rows = [
        (
            "cold: the first request to an adapter that no replica has, one token, to its end",
            "cold",
        ),
        ("of it, the replica's own part: files judged, weights into the engine", "engine"),
        ("warm: what a loaded adapter adds to a request of one token, beside the base", "warm"),
    ]
    lines = ["| what | median, ms | least | most |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {what} | {times[name]['median']} | {times[name]['least']} | {times[name]['most']} |"
        for what, name in rows
    ]
    lines += [
        "",
        f"{found['adapters']} adapters over {found['replicas']} replicas of vLLM on CPUs with "
        f"{found['slots']} slots each; then {found['requests']} requests to all of them and the base at "
        f"once: of the last 50 moves {found['evictions']} were adapters that went for others, and "
        f"{len(found['wrong'])} answers were other than those given alone.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=ADAPTERS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(figures(args.adapters, args.rounds)))


if __name__ == "__main__":
    main()
