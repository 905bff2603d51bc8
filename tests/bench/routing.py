"""What a routing decision costs: 350 replicas, 50 adapters, a full prefix index. `make bench-routing`.

One process, one thread, no engine. Every kind of decision is made in several equal runs, and each counts with
the least of its times, in CPU time of the thread: what is left is the work, and what the garbage collector
does at that place. The last line is JSON; ``--report FILE`` puts the figures into a page.
"""

import argparse
import dataclasses
import gc
import json
import os
import platform
import random
import statistics
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway import fingerprints
from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, prefixes, router
from tests.bench import report_marks, routing_report
from tests.bench.routing_kinds import (
    ADAPTERS,
    IN_FLIGHT,
    KINDS,
    REPLICAS,
    TIER,
    Kind,
    Times,
    measured,
    replica,
)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def figures(values: Sequence[int]) -> dict[str, float]:
    """Return p50, p99 and the most, in µs of ns."""
    found = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}
    return {name: value / 1000 for name, value in found.items()}


def decision(kind: Kind, decisions: int, seed: int, runs: int) -> dict[str, float]:
    """Return µs of one kind of decision: the least of the runs, and the first run as it was."""
    least, first = measured(kind, decisions, seed, runs)
    return {**figures(least), "p99_one_run": figures(first)["p99"]}


def views(rounds: int) -> dict[str, float]:
    """Return milliseconds to take in a view with new statistics, and one in which a role changed."""
    unit = router.Router(load.Loads())
    same, moved = Times(), Times()
    for at in range(rounds):
        fresh = [replica(n, at * 2) for n in range(REPLICAS)]
        same.of(unit.observe, fresh, at * 0.4)
        role = fleet.Role.INTERACTIVE if at % 2 else fleet.Role.BATCH
        other = [dataclasses.replace(fresh[0], role=role), *fresh[1:]]
        moved.of(unit.observe, other, at * 0.4 + 0.2)
    median = statistics.median
    return {"statistics": median(same.cpu) / 1e6, "a role": median(moved.cpu) / 1e6}


def memory(limit: int) -> dict[str, float]:
    """Return what a full index takes, in MB and in bytes a (replica, chunk) pair."""
    gc.collect()
    tracemalloc.start()
    index = prefixes.Index(limit)
    names = [ids.ReplicaId(f"r-{n:012x}") for n in range(REPLICAS)]
    draws = random.Random(1)
    for number in range(limit // 8):
        chain = tuple(draws.getrandbits(64) for _ in range(10))
        index.dispatched(prefixes.Prefix(chain, prefixes.ends(10)[-1]), names[number % REPLICAS])
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"pairs": len(index), "mb": used / 1e6, "bytes_per_pair": used / len(index)}


def fingerprint(size: int, rounds: int = 4000) -> dict[str, float]:
    """Return µs of fingerprinting a chat body of ``size`` bytes."""
    text = "What flows through the gate at night, and who counts it? " * (size // 57 + 1)
    body = {
        "messages": [
            {"role": "system", "content": text[:500]},
            {"role": "user", "content": text[: size - 500]},
        ]
    }
    asked = requests.InferenceRequest(
        ids.RequestId("x"), requests.Endpoint.CHAT, body, "chat", TIER,
        requests.Caller("t", "u", "k"), stream=True, arrived_us=0,
    )  # fmt: skip
    times = Times()
    for _ in range(rounds):
        times.of(fingerprints.of, asked)
    return figures(times.cpu)


def main(words: Sequence[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="bench-routing", description=__doc__)
    parser.add_argument("--decisions", type=int, default=5_000, help="per kind and run")
    parser.add_argument("--runs", type=int, default=5, help="equal runs of each kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", default=[], help="words in the names of the kinds")
    parser.add_argument("--report", type=Path, help="put the figures into this page")
    options = parser.parse_args(words)
    result: dict[str, Any] = {
        "replicas": REPLICAS,
        "adapters": ADAPTERS,
        "in_flight": IN_FLIGHT,
        "decisions": options.decisions,
        "runs": options.runs,
        "load_average": [os.getloadavg()[0]],
        "decision_us": {},
    }
    chosen = [k for k in KINDS if not options.kinds or any(w in k.name for w in options.kinds)]
    for kind in chosen:
        took = decision(kind, options.decisions, options.seed, options.runs)
        result["decision_us"][kind.name] = took
        print(f"{kind.name}: {_words(took)} µs", flush=True)
    result["view_ms"] = views(20)
    print(f"view: {_words(result['view_ms'])} ms of CPU", flush=True)
    result["fingerprint_us"] = {str(size): fingerprint(size) for size in (2048, 16_384, 131_072)}
    for size, took in result["fingerprint_us"].items():
        print(f"fingerprint of {size} bytes: {_words(took)} µs", flush=True)
    result["index"] = memory(500_000)
    print(f"index: {_words(result['index'])}", flush=True)
    result["python"] = platform.python_version()
    result["load_average"].append(os.getloadavg()[0])
    if options.report is not None:
        report_marks.put(options.report, "routing", routing_report.tables(result))
    print(json.dumps(result, default=float))
    return 0


def _words(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in values.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
