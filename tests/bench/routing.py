"""What a routing decision costs: 350 replicas, 50 adapters, a full prefix index. `make bench-routing`.

One process, one thread, no engine: the router is driven as a queue's owner drives it (place, close,
returned, and a view every 200 ms of its own time). Reported in CPU time of the thread, which a busy machine
does not stretch by waiting, and in wall time. The last line is JSON.
"""

import argparse
import collections
import dataclasses
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from gateway import fingerprints
from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, prefixes, router, routing

REPLICAS, ADAPTERS, SEATS = 350, 50, 64
IN_FLIGHT = 6000  # of 22,400 seats
PROMPTS = 3000  # different conversations
TIER = requests.Tier.INTERACTIVE


def replica(number: int, adapters: dict[str, str], at_us: int) -> fleet.Replica:
    """Return one replica of the fleet."""
    spec = fleet.ReplicaSpec(
        "chat", "1", fleet.EngineKind.VLLM, seats=SEATS, max_context=32768, adapters=adapters
    )
    stats = fleet.ReplicaStats(at_us, SEATS, kv_blocks=30_000, kv_free=20_000, kv_block_tokens=16)
    return fleet.Replica(
        replica_id=ids.ReplicaId(f"r-{number:012x}"),
        cluster="c",
        lease_id=ids.LeaseId("l"),
        slot_id=ids.SlotId("l.s0"),
        slurm_job_id="1",
        node=f"n{number // 4}",
        spec=spec,
        state=fleet.ReplicaState.SERVING,
        role=fleet.Role.SHARED,
        address=f"10.0.0.1:{number}",
        incarnation=1,
        stats=stats,
    )


def conversations(draws: random.Random) -> list[prefixes.Prefix]:
    """Return prompts of 2 to 64 KB; all begin alike, a tenth of them alike for longer."""
    found = []
    for number in range(PROMPTS):
        count = draws.randint(4, 34)
        common = 2 if number % 10 else 6
        chain = tuple(
            depth if depth < common else number * 64 + depth + 1000 for depth in range(count)
        )
        found.append(prefixes.Prefix(chain, prefixes.ends(count)[-1] + draws.randint(0, 2000)))
    return found


@dataclasses.dataclass
class Times:
    """Nanoseconds of many calls."""

    cpu: list[int] = dataclasses.field(default_factory=list)
    wall: list[int] = dataclasses.field(default_factory=list)

    def of(self, call: Callable[..., Any], *given: Any) -> Any:
        """Time one call."""
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*given)
        self.wall.append(time.perf_counter_ns() - wall)
        self.cpu.append(time.thread_time_ns() - cpu)
        return result

    def summary(self) -> dict[str, float]:
        """Return p50, p99 of CPU time and p99 of wall time in µs."""
        return {
            "cpu_p50": percentile(self.cpu, 0.5) / 1000,
            "cpu_p99": percentile(self.cpu, 0.99) / 1000,
            "wall_p50": percentile(self.wall, 0.5) / 1000,
            "wall_p99": percentile(self.wall, 0.99) / 1000,
        }


def percentile(values: Sequence[int], share: float) -> float:
    """Return the nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def drive(kind: str, decisions: int, seed: int) -> dict[str, float]:
    """Return the times of decisions of one kind of traffic, at a steady load."""
    draws = random.Random(seed)
    adapters = {f"a{n}": "/weights" for n in range(ADAPTERS)}
    names = list(adapters)
    unit, prompts = router.Router(load.Loads()), conversations(draws)
    unit.observe([replica(n, adapters, 0) for n in range(REPLICAS)], 0.0)
    running: list[router.Placed] = []
    reading: collections.deque[router.Placed] = collections.deque()
    times = Times()
    moment = router.Moment(0.1)
    gc.collect()
    gc.freeze()
    for number in range(IN_FLIGHT + decisions):
        prefix = (
            draws.choice(prompts) if kind != "new" else prefixes.Prefix((number + 10**9,), 4000)
        )
        ask = routing.Ask(
            "chat",
            "1",
            TIER,
            adapter=names[int(draws.random() ** 2 * ADAPTERS)] if kind == "adapters" else None,
            prompt_tokens=prefix.size // 4,
            output_tokens=300,
            prefix=prefixes.NONE if kind == "no prefix" else prefix,
            hint=f"h{number % 500}" if kind == "hint" else None,
        )
        draw = draws.random()
        if number < IN_FLIGHT:
            placed = unit.place(ask, moment, draw)
        else:
            placed = times.of(unit.place, ask, moment, draw)
        if placed is None:
            raise SystemExit("bench-routing: no room: the load is too high for the fleet")
        running.append(placed)
        reading.append(placed)
        if len(reading) > REPLICAS:  # about one prompt a replica is being computed
            reading.popleft().guard.prefilled()
        if len(running) > IN_FLIGHT:
            last = running.pop(draws.randrange(len(running)))
            last.guard.close()
            size = max(1, last.prefix.size // 4)
            unit.returned(last, prompt_tokens=size, cached_tokens=round(last.claimed * size))
    return times.summary()


def views(rounds: int) -> dict[str, float]:
    """Return milliseconds to take in a view with new statistics, and one in which a role changed."""
    adapters = {f"a{n}": "/weights" for n in range(ADAPTERS)}
    unit = router.Router(load.Loads())
    same, moved = Times(), Times()
    for at in range(rounds):
        fresh = [replica(n, adapters, at * 2) for n in range(REPLICAS)]
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
    return times.summary()


def main(words: Sequence[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="bench-routing", description=__doc__)
    parser.add_argument("--decisions", type=int, default=20_000, help="per kind of traffic")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(words)
    result: dict[str, Any] = {
        "replicas": REPLICAS,
        "adapters": ADAPTERS,
        "in_flight": IN_FLIGHT,
        "decision_us": {},
    }
    for kind in ("prefix", "new", "no prefix", "adapters", "hint"):
        result["decision_us"][kind] = drive(kind, options.decisions, options.seed)
        print(f"decision, {kind}: {_words(result['decision_us'][kind])} µs", flush=True)
    result["view_ms"] = views(20)
    print(f"view: {_words(result['view_ms'])} ms of CPU", flush=True)
    result["fingerprint_us"] = {str(size): fingerprint(size) for size in (2048, 16_384, 131_072)}
    for size, took in result["fingerprint_us"].items():
        print(f"fingerprint of {size} bytes: {_words(took)} µs", flush=True)
    result["index"] = memory(500_000)
    print(f"index: {_words(result['index'])}", flush=True)
    result["python"] = platform.python_version()
    result["load_average"] = os.getloadavg()[0]
    print(json.dumps(result, default=float))
    return 0


def _words(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in values.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
