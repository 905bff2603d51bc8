"""The kinds of request that `bench-routing` times: a fleet, the traffic on it, and what a request asks."""

import collections
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from scheduler.contracts import fleet, ids, requests
from scheduler.core import load, prefixes, router, routing

REPLICAS, ADAPTERS, SEATS = 350, 50, 64
IN_FLIGHT = 6000  # of 22,400 seats
PROMPTS = 3000  # different conversations
TIER = requests.Tier.INTERACTIVE
NAMES = tuple(f"a{number}" for number in range(ADAPTERS))
ALL = dict.fromkeys(NAMES, "/weights")
P = ParamSpec("P")
R = TypeVar("R")
Asker = Callable[[int, random.Random, Sequence[prefixes.Prefix]], routing.Ask]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of request and the state that it meets.

    Attributes:
        name: in the report.
        ask: makes the request of a number.
        changes: to each replica's spec, by its number.
        in_flight: requests that run all the while; 0: as many as find room.
        now: when they are placed; the statistics came at 0.
        refused: whether no room is the answer that is timed.
        prompts: different conversations.
        reading: prompts that are being computed.
        kv_blocks: of a replica, of 16 tokens; two thirds are free.
    """

    name: str
    ask: Asker
    changes: Callable[[int], dict[str, object]] = lambda _: {}
    in_flight: int = IN_FLIGHT
    now: float = 0.1
    refused: bool = False
    prompts: int = PROMPTS
    reading: int = REPLICAS
    kv_blocks: int = 30_000


def replica(
    number: int, at_us: int = 0, kv_blocks: int = 30_000, **changes: object
) -> fleet.Replica:
    """Return one replica of the fleet, every adapter on it."""
    fields: dict[str, object] = {
        "version": "1", "seats": SEATS, "max_context": 32768, "adapters": ALL, **changes
    }  # fmt: skip
    spec = fleet.ReplicaSpec("chat", engine=fleet.EngineKind.VLLM, **fields)  # type: ignore[arg-type]
    stats = fleet.ReplicaStats(
        at_us, SEATS, kv_blocks=kv_blocks, kv_free=2 * kv_blocks // 3, kv_block_tokens=16
    )
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


def conversations(draws: random.Random, many: int = PROMPTS) -> list[prefixes.Prefix]:
    """Return prompts of 2 to 64 KB; all begin alike, a tenth of them alike for longer."""
    found = []
    for number in range(many):
        count = draws.randint(4, 34)
        common = 2 if number % 10 else 6
        chain = tuple(
            depth if depth < common else number * 64 + depth + 1000 for depth in range(count)
        )
        found.append(prefixes.Prefix(chain, prefixes.ends(count)[-1] + draws.randint(0, 2000)))
    return found


def asking(
    new: bool = False,
    bare: bool = False,
    hints: bool = False,
    adapters: bool = False,
    **more: object,
) -> Asker:
    """Return a maker of requests.

    Args:
        new: each has a prefix of its own that nobody knows.
        bare: they have no fingerprints.
        hints: each has one of 500 cache hints.
        adapters: each asks for one of the adapters, some much oftener than others.
        more: other fields of all.
    """

    def ask(number: int, draws: random.Random, known: Sequence[prefixes.Prefix]) -> routing.Ask:
        prefix = prefixes.Prefix((number + 10**9,), 4000) if new else draws.choice(known)
        fields: dict[str, object] = {"version": "1", "tier": TIER, **more}
        return routing.Ask(
            "chat",
            adapter=NAMES[int(draws.random() ** 2 * ADAPTERS)] if adapters else None,
            prompt_tokens=prefix.size // 4,
            output_tokens=300,
            prefix=prefixes.NONE if bare else prefix,
            hint=f"h{number % 500}" if hints else None,
            **fields,  # type: ignore[arg-type]
        )

    return ask


def _versions(number: int, draws: random.Random, known: Sequence[prefixes.Prefix]) -> routing.Ask:
    plain = asking()(number, draws, known)
    return dataclasses.replace(plain, version="2" if draws.random() < 0.1 else "1")


def _some_long(number: int, draws: random.Random, known: Sequence[prefixes.Prefix]) -> routing.Ask:
    return dataclasses.replace(asking()(number, draws, known), long=True)


def _tenth(number: int) -> dict[str, object]:
    """A tenth of the fleet runs the next version."""
    return {"version": "2" if number % 10 == 0 else "1"}


def _some(number: int) -> dict[str, object]:
    """Each replica has ten of the adapters."""
    mine = random.Random(number).sample(NAMES, 10)
    return {"adapters": dict.fromkeys(mine, "/weights")}


def _tight(_: int) -> dict[str, object]:
    return {"seats": 20}


KINDS = (
    Kind("hit: prompts that share prefixes", asking()),
    Kind("miss: new prefixes", asking(new=True)),
    Kind("miss, idle fleet", asking(new=True), in_flight=2),
    Kind("no fingerprints", asking(bare=True)),
    Kind("saturated: 40 conversations are all traffic", asking(), prompts=40),
    Kind("cache hints", asking(hints=True, bare=True)),
    Kind("adapters: 50, each on every replica", asking(adapters=True, bare=True)),
    Kind("adapters: 50, ten on each replica", asking(adapters=True, bare=True), _some),
    Kind("long pool", _some_long, in_flight=1200, reading=60),
    Kind("a team that crowds", asking(left=0.1)),
    Kind("batch", asking(tier=requests.Tier.BATCH)),
    Kind("stale statistics", asking(), now=5.0),
    Kind("stale statistics, batch", asking(tier=requests.Tier.BATCH), now=5.0),
    Kind("rollout: a tenth is the next version", _versions, _tenth),
    Kind("all full: no seat", asking(), _tight, in_flight=0, refused=True),
    Kind("all full: a seat comes free", asking(), _tight, in_flight=0),
    Kind("all full: no KV cache", asking(), in_flight=0, refused=True, kv_blocks=12_000),
    Kind("all full: some KV cache comes free", asking(), in_flight=0, kv_blocks=12_000),
    Kind("all full, no statistics", asking(), _tight, in_flight=0, refused=True, now=5.0),
)


@dataclasses.dataclass
class Times:
    """Nanoseconds of many calls."""

    cpu: list[int] = dataclasses.field(default_factory=list)
    wall: list[int] = dataclasses.field(default_factory=list)

    def of(self, call: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
        """Time one call."""
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*given, **named)
        self.wall.append(time.perf_counter_ns() - wall)
        self.cpu.append(time.thread_time_ns() - cpu)
        return result


class Drive:
    """One kind's fleet under its traffic, as a queue's owner drives it: place, close, returned."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind = kind
        self._draws = random.Random(seed)
        self._prompts = conversations(self._draws, kind.prompts)
        self._unit = router.Router(load.Loads())
        self._unit.observe(
            [replica(n, 0, kind.kv_blocks, **kind.changes(n)) for n in range(REPLICAS)], 0.0
        )
        self._running: list[router.Placed] = []
        self._reading: collections.deque[router.Placed] = collections.deque()
        self._number = 0
        self._moment = router.Moment(kind.now)

    def fill(self) -> None:
        """Bring the fleet to the kind's load."""
        most = self._kind.in_flight or 10**6
        missed = 0
        while len(self._running) < most and missed < 50:
            missed = 0 if self._placed(self._next()) else missed + 1
        if missed and self._kind.in_flight:
            raise SystemExit(f"bench-routing: {self._kind.name}: no room: too much for the fleet")

    def decide(self, times: Times, decisions: int) -> None:
        """Time so many decisions; those that another kind would be are made and not counted."""
        full, refused = not self._kind.in_flight, self._kind.refused
        for _ in range(20 * decisions):
            if len(times.cpu) == decisions:
                return
            if full and not refused:
                self._end()
            placed = self._placed(self._next(), times)
            if placed is refused:
                times.cpu.pop()
                times.wall.pop()
            if not full or (placed and not refused):
                self._end()
            elif refused and not placed and len(times.cpu) % 8 == 0:
                self._end()  # so that it is not the same fleet all the time
        raise SystemExit(f"bench-routing: {self._kind.name}: such decisions are too few here")

    def _next(self) -> routing.Ask:
        self._number += 1
        return self._kind.ask(self._number, self._draws, self._prompts)

    def _placed(self, ask: routing.Ask, times: Times | None = None) -> bool:
        draw = self._draws.random()
        if times is None:
            placed = self._unit.place(ask, self._moment, draw)
        else:
            placed = times.of(self._unit.place, ask, self._moment, draw)
        if placed is None:
            return False
        self._running.append(placed)
        self._reading.append(placed)
        if len(self._reading) > self._kind.reading:
            self._reading.popleft().guard.prefilled()
        return True

    def _end(self) -> None:
        if not self._running:
            return
        last = self._running.pop(self._draws.randrange(len(self._running)))
        last.guard.close()
        size = max(1, last.prefix.size // 4)
        self._unit.returned(last, prompt_tokens=size, cached_tokens=round(last.claimed * size))


def measured(kind: Kind, decisions: int, seed: int, runs: int) -> tuple[list[int], list[int]]:
    """Return ns of CPU of each decision: the least of so many equal runs, and those of the first run.

    The runs are the same to the last draw, so what differs between them is the machine's.
    """
    every: list[list[int]] = []
    for _ in range(runs):
        drive, times = Drive(kind, seed), Times()
        drive.fill()
        gc.collect()
        gc.freeze()  # as a gateway does when it is ready
        drive.decide(times, decisions)
        gc.unfreeze()
        every.append(times.cpu)
    return [min(each) for each in zip(*every, strict=True)], every[0]
