"""The prefix workload on a model of the engines: to tune routing by, and for the oracle.

Virtual time. A replica computes one prefill after the other, shares its time among answers under way not at
all (they only keep their KV blocks), and evicts the least recently used idle block, tails first, as vLLM
does. `python -m tests.bench.prefix_replay` prints one line an arm.
"""

import argparse
import collections
import dataclasses
import functools
import heapq
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence

from gateway import fingerprints
from scheduler.contracts import fleet, ids, requests
from scheduler.core import holders, load, prefixes, router, routing
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
        at_once: requests under way, each followed by the next as it ends; 0: they come by the trace's time.
    """

    replicas: int = 3
    blocks: int = 2000
    prefill_per_s: float = 12_000.0
    step_s: float = 0.01
    speed: float = 1.0
    at_once: int = 0


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

    def holders(self, prefix: prefixes.Prefix, least: float = 0.0) -> holders.Holders:
        """Return the share of the prompt's blocks that each cache holds."""
        whole = max(1, len(self.names))
        found = {name: cache.hits(self.names) / whole for name, cache in self._caches.items()}
        return holders.Holders.of(
            {name: share for name, share in found.items() if share and share >= least}
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What an arm got.

    Attributes:
        hit_share: cached part of all prompt tokens.
        ttft_ms: mean time to first token.
        spread: requests of the busiest replica over the mean.
    """

    hit_share: float
    ttft_ms: float
    spread: float


class _Fleet:
    """The modelled replicas under one arm: what is cached where, and what is under way."""

    def __init__(self, arm: str, engine: Engine, policy: routing.Policy, seed: int) -> None:
        size = INFINITE if arm == "oracle" else engine.blocks
        self.arm, self.engine = arm, engine
        self.names = [ids.ReplicaId(f"r-{n:012x}") for n in range(engine.replicas)]
        self.caches = {name: Cache(size) for name in self.names}
        self.unit = router.Router(load.Loads(), policy, workload.CHUNK_BYTES)
        self.known = Known(self.caches) if arm in ("stage2", "oracle") else None
        if self.known is not None:
            self.unit._indexes["chat"] = self.known
        self.unit.observe([standing(name, size) for name in self.names], 0.0)
        self.free_at = dict.fromkeys(self.names, 0.0)
        self.now = 0.0
        self.running = 0
        self._draws = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Have something happen at a moment."""
        heapq.heappush(self._events, (moment, next(self._count), call))

    def until(self, moment: float) -> None:
        """Let everything happen that is due, and come to ``moment``."""
        while self._events and self._events[0][0] <= moment:
            self.next()
        self.now = max(self.now, moment)

    def next(self) -> None:
        """Let the next thing happen."""
        moment, _, call = heapq.heappop(self._events)
        self.now = max(self.now, moment)
        call()

    def place(
        self, row: workload.Request, blocks: Sequence[int], number: int
    ) -> tuple[ids.ReplicaId, router.Placed | None]:
        """Choose a replica, waiting until there is room."""
        if self.arm == "random":
            return self._draws.choice(self.names), None
        if self.arm == "round_robin":
            return self.names[number % len(self.names)], None
        if self.known is not None:
            self.known.names = blocks
        ask = routing.Ask(
            "chat", "1", TIER, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens,
            prefix=fingerprints.chain(0, row.text.encode(), workload.CHUNK_BYTES),
        )  # fmt: skip
        while (placed := self.unit.place(ask, router.Moment(0.1), self._draws.random())) is None:
            self.next()
        return placed.replica.replica_id, placed

    def end(
        self, name: ids.ReplicaId, blocks: Sequence[int], placed: router.Placed | None, hits: int
    ) -> None:
        """A request has its answer."""
        self.running -= 1
        self.caches[name].leave(blocks)
        if placed is not None:
            placed.guard.close()
            size = workload.BLOCK_TOKENS
            self.unit.returned(placed, prompt_tokens=len(blocks) * size, cached_tokens=hits * size)


def replay(
    rows: Sequence[workload.Request],
    arm: str,
    engine: Engine,
    policy: routing.Policy = routing.DEFAULT,
    seed: int = 1,
) -> Outcome:
    """Return what one arm gets of the workload."""
    field = _Fleet(arm, engine, policy, seed)
    hit_blocks = all_blocks = 0
    ttfts: list[float] = []
    taken: collections.Counter[ids.ReplicaId] = collections.Counter()
    for number, row in enumerate(rows):
        if engine.at_once:
            while field.running >= engine.at_once:
                field.next()
        else:
            field.until(row.arrived_s / engine.speed)
        arrived, blocks = field.now, _names(row.blocks)
        name, placed = field.place(row, blocks, number)
        cache = field.caches[name]
        # An engine computes one token at least, and so the whole last block.
        hits = min(cache.hits(blocks), len(blocks) - 1)
        cache.take(blocks)
        computed = (len(blocks) - hits) * workload.BLOCK_TOKENS
        start = max(field.now, field.free_at[name])
        field.free_at[name] = start + computed / engine.prefill_per_s
        first = field.free_at[name] + engine.step_s
        if placed is not None:
            field.at(first, placed.guard.prefilled)
        field.running += 1
        done = first + row.output_tokens * engine.step_s
        field.at(done, functools.partial(field.end, name, blocks, placed, hits))
        ttfts.append(first - arrived)
        taken[name] += 1
        hit_blocks, all_blocks = hit_blocks + hits, all_blocks + len(blocks)
    busiest = max(taken.values()) / len(rows) * engine.replicas
    return Outcome(hit_blocks / all_blocks, statistics.mean(ttfts) * 1000, busiest)


def _names(blocks: Sequence[int]) -> list[int]:
    """Return what a cache calls the blocks: each stands for all before it."""
    found, state = [], 0
    for block in blocks:
        state = hash((state, block))
        found.append(state)
    return found


def standing(name: ids.ReplicaId, blocks: int) -> fleet.Replica:
    """Return a replica that serves, with so many KV blocks."""
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
    parser.add_argument("--speed", type=float, nargs="+", default=[8.0])
    parser.add_argument("--at-once", type=int, default=0, help="0: by the trace's time")
    options = parser.parse_args(words)
    rows = workload.load(options.requests)
    result = []
    for speed in options.speed:
        for blocks in options.blocks:
            engine = Engine(blocks=blocks, speed=speed, at_once=options.at_once)
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
