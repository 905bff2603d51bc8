"""The prefix workload on a model of the engines: to tune routing by, and for the oracle.

Virtual time. A replica computes one prefill after the other, shares its time among answers under way not at
all (they only keep their KV blocks), and evicts the least recently used idle block, tails first, as vLLM
does. `python -m tests.bench.prefix_replay` prints one line an arm.
"""

import argparse
import collections
import dataclasses
import heapq
import json
import random
import statistics
import sys
from collections.abc import Sequence

from gateway import fingerprints
from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, prefixes, router, routing
from tests.bench import prefix_workload as workload

ARMS = ("random", "round_robin", "stage1", "stage2", "oracle")
SEATS = 64
TIER = requests.Tier.INTERACTIVE
INFINITE = 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """How the modelled engines are.

    Attributes:
        replicas: how many.
        blocks: KV blocks of each, of 32 tokens.
        prefill_per_s: prompt tokens computed a second.
        step_s: seconds of one output token.
        speed: how much faster than in the trace requests come.
    """

    replicas: int = 3
    blocks: int = 2000
    prefill_per_s: float = 12_000.0
    step_s: float = 0.01
    speed: float = 1.0


class Cache:
    """The KV blocks of one replica, by prefix."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._users: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return len(self._idle) + len(self._users)

    def hits(self, names: Sequence[int]) -> int:
        """Return how many of a prompt's blocks are cached, from the first on."""
        count = 0
        for name in names:
            if name not in self._idle and name not in self._users:
                break
            count += 1
        return count

    def take(self, names: Sequence[int]) -> None:
        """Use a prompt's blocks, evicting others."""
        for name in names:
            self._idle.pop(name, None)
            self._users[name] += 1
        while len(self) > self._most and self._idle:
            self._idle.popitem(last=False)

    def leave(self, names: Sequence[int]) -> None:
        """Use them no more; the tail is evicted before the head."""
        for name in reversed(names):
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._idle[name] = None


class Known(prefixes.Index):
    """An index that looks into the caches themselves: what perfect events without any delay would know."""

    def __init__(self, caches: dict[ids.ReplicaId, Cache]) -> None:
        super().__init__(chunk_bytes=workload.CHUNK_BYTES)
        self._caches = caches
        self.names: Sequence[int] = ()

    def longest(self, prefix: prefixes.Prefix, least: float = 0.0) -> dict[ids.ReplicaId, float]:
        """Return the share of the prompt's blocks that each cache holds."""
        whole = max(1, len(self.names))
        found = {name: cache.hits(self.names) / whole for name, cache in self._caches.items()}
        return {name: share for name, share in found.items() if share and share >= least}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What an arm got: the cached part of all prompt tokens, and the mean time to first token."""

    hit_share: float
    ttft_ms: float
    spread: float


def replay(
    rows: Sequence[workload.Request],
    arm: str,
    engine: Engine,
    policy: routing.Policy = routing.DEFAULT,
    seed: int = 1,
) -> Outcome:
    """Return what one arm gets of the workload."""
    draws = random.Random(seed)
    size = INFINITE if arm == "oracle" else engine.blocks
    names = [ids.ReplicaId(f"r-{n:012x}") for n in range(engine.replicas)]
    caches = {name: Cache(size) for name in names}
    unit = router.Router(load.Loads(), policy, workload.CHUNK_BYTES)
    known = Known(caches) if arm in ("stage2", "oracle") else None
    if known is not None:
        unit._indexes["chat"] = known
    unit.observe([_replica(name, size) for name in names], 0.0)
    free_at = dict.fromkeys(names, 0.0)
    ends: list[tuple[float, int, ids.ReplicaId, Sequence[int], router.Placed | None, int, int]] = []
    cached_total = prompt_total = 0
    ttfts: list[float] = []
    taken: collections.Counter[ids.ReplicaId] = collections.Counter()
    for number, row in enumerate(rows):
        now = row.arrived_s / engine.speed
        while ends and ends[0][0] <= now:
            _end(heapq.heappop(ends), caches, unit)
        blocks = _names(row.blocks)
        placed: router.Placed | None = None
        if arm == "random":
            name = draws.choice(names)
        elif arm == "round_robin":
            name = names[number % len(names)]
        else:
            if known is not None:
                known.names = blocks
            prefix = fingerprints.chain(0, row.text.encode(), workload.CHUNK_BYTES)
            ask = routing.Ask(
                "chat", "1", TIER, prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens, prefix=prefix,
            )  # fmt: skip
            placed = unit.place(ask, router.Moment(0.1), draws.random())
            if placed is None:
                raise RuntimeError("no room: the modelled fleet is too slow for this speed")
            name = placed.replica.replica_id
        taken[name] += 1
        cache = caches[name]
        start = max(now, free_at[name])
        hits = min(cache.hits(blocks), len(blocks) - 1)
        cache.take(blocks)
        free_at[name] = start + (len(blocks) - hits) * workload.BLOCK_TOKENS / engine.prefill_per_s
        first = free_at[name] + engine.step_s
        ttfts.append(first - now)
        cached, prompt = hits * workload.BLOCK_TOKENS, row.prompt_tokens
        cached_total, prompt_total = cached_total + cached, prompt_total + prompt
        done = first + row.output_tokens * engine.step_s
        heapq.heappush(ends, (done, number, name, blocks, placed, prompt, cached))
    share = max(taken.values()) / len(rows) * engine.replicas
    return Outcome(cached_total / prompt_total, statistics.mean(ttfts) * 1000, share)


def _end(
    end: tuple[float, int, ids.ReplicaId, Sequence[int], router.Placed | None, int, int],
    caches: dict[ids.ReplicaId, Cache],
    unit: router.Router,
) -> None:
    _, _, name, blocks, placed, prompt, cached = end
    caches[name].leave(blocks)
    if placed is not None:
        placed.guard.close()
        unit.returned(placed, prompt_tokens=prompt, cached_tokens=cached)


def _names(blocks: Sequence[int]) -> list[int]:
    """Return what a cache calls the blocks: each stands for all before it."""
    found, state = [], 0
    for block in blocks:
        state = hash((state, block))
        found.append(state)
    return found


def _replica(name: ids.ReplicaId, blocks: int) -> fleet.Replica:
    spec = fleet.ReplicaSpec("chat", "1", fleet.EngineKind.VLLM, seats=SEATS, max_context=4096)
    known = 0 if blocks == INFINITE else blocks
    stats = fleet.ReplicaStats(
        1, SEATS, kv_blocks=known, kv_free=known, kv_block_tokens=workload.BLOCK_TOKENS
    )
    return fleet.Replica(
        name, "c", ids.LeaseId("l"), ids.SlotId("l.s0"), "1", "n", spec,
        fleet.ReplicaState.SERVING, fleet.Role.SHARED, "127.0.0.1:1", 1, stats=stats,
    )  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Print every arm's figures."""
    parser = argparse.ArgumentParser(prog="prefix_replay", description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000])
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0])
    options = parser.parse_args(words)
    rows = workload.load(options.requests)
    result = []
    for speed in options.speed:
        for blocks in options.blocks:
            engine = Engine(blocks=blocks, speed=speed)
            arms = {arm: replay(rows, arm, engine) for arm in ARMS}
            result.append(
                {
                    "blocks": blocks,
                    "speed": speed,
                    "hit_share": {arm: round(got.hit_share, 4) for arm, got in arms.items()},
                    "ttft_ms": {arm: round(got.ttft_ms, 2) for arm, got in arms.items()},
                }
            )
            print(
                f"speed {speed:g}, {blocks} blocks: "
                + "; ".join(
                    f"{arm} {got.hit_share:.1%} {got.ttft_ms:.0f} ms x{got.spread:.2f}"
                    for arm, got in arms.items()
                ),
                flush=True,
            )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
