"""A gateway in a process of its own, for tests that measure it: memory, signals, many streams.

Reads one JSON object from the command line: the replica's address and secret file, and settings. Prints
its addresses, and at its end how the attempts ended, by outcome.
"""

import collections
import json
import sys
from typing import Any

import uvloop

from forebay import lifeline
from gateway import dependencies, server, settings
from scheduler.contracts import clock, fleet, ports, usage
from tests.unit.gateway import fleets, harness


class CountingSink:
    """Counts rows instead of keeping them, so that memory is the gateway's own."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def append(self, row: usage.Row) -> None:
        if isinstance(row, usage.UsageRow):
            self.counts[f"{row.kind.value} {row.outcome.value}"] += 1

    async def sync(self) -> None:
        """Nothing is kept."""

    def ready(self) -> None:
        """There is always room."""


def main(argument: str) -> None:
    """Serve until SIGTERM."""
    lifeline.open_files()
    told: dict[str, Any] = json.loads(argument)
    sink = CountingSink()
    seats = told["settings"].pop("replica_seats", 256)
    replica = fleets.make_replica(
        "r1",
        address=told["address"],
        secret_file=told["secret_file"],
        seats=seats,
        stats=fleet.ReplicaStats(at_us=1, seats=seats),
    )
    deps = dependencies.Dependencies(
        settings=settings.GatewaySettings(http_port=0, grpc_port=0, **told["settings"]),
        authenticator=ports.StaticKeys(harness.KEYS),
        fleet=ports.StaticFleet(fleets.make_view([replica])),
        sink=sink,
        clock=clock.SystemClock(),
        cluster="c1",
    )

    def ready(where: server.Addresses) -> None:
        print(json.dumps({"http": where.http, "grpc": where.grpc}), flush=True)

    uvloop.run(server.serve(deps, ready=ready))
    print(json.dumps(sink.counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
