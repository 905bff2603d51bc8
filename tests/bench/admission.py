"""What a request costs in admission: CPU µs of enter, wait and leave, by how many wait.

Usage: python -P -m tests.bench.admission [waiting ...]; one JSON object on the last line. CPU time of this
process, medians of several rounds; no sockets, no bodies: the waiting room alone, with 64 replicas.
"""

import asyncio
import json
import statistics
import sys
import time

from gateway import asks, dependencies, local_room, local_waiter, settings
from scheduler.contracts import clock, fleet, ids, ports, quota, requests, usage
from scheduler.core import admission

NOW_US = clock.FakeClock().wall_us()
REPLICAS, SEATS, ROUNDS, EACH = 64, 32, 7, 1_000


def view() -> fleet.FleetView:
    """Return a fleet of one model."""
    spec = fleet.ReplicaSpec(
        "chat", "1", fleet.EngineKind.SIMULATED, seats=SEATS, max_context=32768
    )
    replicas = tuple(
        fleet.Replica(
            ids.ReplicaId(f"r{n}"), "c", ids.LeaseId("l"), ids.SlotId("s"), "1", "n", spec,
            fleet.ReplicaState.SERVING, fleet.Role.SHARED, "h:1", 1,
            stats=fleet.ReplicaStats(at_us=1, seats=SEATS),
        )
        for n in range(REPLICAS)
    )  # fmt: skip
    return fleet.FleetView(1, 1, {"chat": fleet.Route("chat", {"1": 100}, 32768)}, replicas)


def asking(n: int) -> asks.Asking:
    """Return the n-th request."""
    return asks.Asking(
        f"req-{n}", "chat", requests.Tier.INTERACTIVE, f"team{n % 40}", "u", "k",
        NOW_US, chars=2000, size=2048, max_tokens=200,
    )  # fmt: skip


def room() -> local_room.LocalRoom:
    """Return a room that takes any number."""
    most = 10**6
    table = settings.GatewaySettings(
        deadline_interactive_s=1e6,
        queue_interactive=most,
        queue_total=most,
        queue_interactive_bytes=2**40,
        queue_total_bytes=2**40,
    )
    deps = dependencies.Dependencies(
        table,
        ports.StaticKeys({}),
        ports.StaticFleet(view()),
        usage.MemorySink(),
        clock.FakeClock(),  # stands still: statistics stay fresh
        "c",
    )
    return local_room.LocalRoom(deps)


async def through(made: local_room.LocalRoom, first: int) -> float:
    """Return CPU µs a request where somebody has a free seat at once."""
    askings = [asking(first + n) for n in range(EACH)]
    began = time.process_time()
    for one in askings:
        waiter = made.enter(one)
        grant = await made.wait(waiter)
        grant.close()
        made.leave(waiter, quota.Spent(500, 0, 100))
        await asyncio.sleep(0)
    return (time.process_time() - began) / EACH * 1e6


async def queued(waiting: int) -> dict[str, float]:
    """Return CPU µs of a request that waits behind ``waiting`` others, until it has left."""
    made = room()
    running = [_enter(made, n) for n in range(REPLICAS * SEATS)]
    line = [_enter(made, 10**6 + n) for n in range(waiting)]
    took: list[float] = []
    for round_ in range(ROUNDS):
        fresh = [asking(2 * 10**6 + round_ * EACH + n) for n in range(EACH)]
        began = time.process_time()
        for one in fresh:
            line.append(_watched(made.enter(one)))
            made.leave(running.pop(), quota.Spent(500, 0, 100))
            await asyncio.sleep(0)  # the seat goes to the next
        took.append((time.process_time() - began) / EACH * 1e6)
        running = [waiter for waiter in (*running, *line) if waiter.open is not None]
        line = [waiter for waiter in line if waiter.open is None]
    return {"median": round(statistics.median(took), 1), "most": round(max(took), 1)}


def _enter(made: local_room.LocalRoom, n: int) -> local_waiter.LocalWaiter:
    return _watched(made.enter(asking(n)))


def _watched(waiter: local_waiter.LocalWaiter) -> local_waiter.LocalWaiter:
    """Let its prompt be computed as soon as it has its turn, as an idle replica does."""

    def begun() -> None:
        if waiter.open is not None:
            waiter.open.prefilled()

    waiter.ring = begun
    begun()
    return waiter


def queue_alone(waiting: int) -> dict[str, float]:
    """Return CPU µs of the core queue's operations with ``waiting`` tickets of 40 teams."""
    bound = admission.Bound(10**7, 2**50)
    queue = admission.Queue(admission.Rules(dict.fromkeys(requests.Tier, bound), bound))

    def ticket(n: int) -> admission.Ticket:
        return admission.Ticket(
            str(n), requests.Tier.INTERACTIVE, f"t{n % 40}", 0.0, 60.0 + n % 997, n % 5, 1, 900.0
        )

    for n in range(waiting):
        queue.offer(ticket(n), now=0.0, drain_per_s=None)
    found: dict[str, float] = {}
    fresh = [ticket(waiting + n) for n in range(EACH)]
    began = time.process_time()
    for one in fresh:
        queue.offer(one, now=0.0, drain_per_s=100.0 * waiting)
    found["offer"] = (time.process_time() - began) / EACH * 1e6
    began = time.process_time()
    for _ in range(EACH):
        queue.take(lambda one: one, 0.0)
    found["take"] = (time.process_time() - began) / EACH * 1e6
    return {name: round(us, 1) for name, us in found.items()}


async def main(sizes: list[int]) -> None:
    """Print the table."""
    made = room()
    await through(made, 0)
    free = [await through(made, (n + 1) * EACH) for n in range(ROUNDS)]
    found = {
        "python": sys.version.split()[0],
        "replicas": REPLICAS,
        "free_seat_us": {"median": round(statistics.median(free), 1), "most": round(max(free), 1)},
        "queued_us": {str(size): await queued(size) for size in sizes},
        "queue_us": {str(size): queue_alone(size) for size in sizes},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main([int(word) for word in sys.argv[1:]] or [1_000, 10_000, 100_000]))
