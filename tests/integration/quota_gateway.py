"""A gateway in a process of its own with quotas from a registry and a spool on disk.

Reads one JSON object from the command line: the state folder, the replica, and settings. Prints its
addresses.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from accounting import spool
from gateway import dependencies, server, settings
from scheduler.contracts import clock, ports
from scheduler.runtime import quota_keeper
from scheduler.runtime.registry import database, store
from tests.unit.gateway import fleets, harness

REFRESH_S = 0.1


async def serve(told: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    state, time = Path(told["state"]), clock.SystemClock()
    registry = store.Registry.open(database.sqlite_url(state))
    keeper = quota_keeper.Keeper(registry.quotas, time, refresh_s=REFRESH_S)
    sink = spool.Spool(state / "spool", f"gateway-{os.getpid()}", clock=time)
    replica = fleets.make_replica(
        "r1", address=told["address"], secret_file=told["secret_file"], seats=told["seats"]
    )
    deps = dependencies.Dependencies(
        settings=settings.GatewaySettings(http_port=0, grpc_port=0, **told["settings"]),
        authenticator=ports.StaticKeys(harness.KEYS),
        fleet=ports.StaticFleet(fleets.make_view([replica])),
        sink=sink,
        clock=time,
        cluster="c1",
        quotas=keeper.book,
    )

    def ready(where: server.Addresses) -> None:
        print(json.dumps({"http": where.http}), flush=True)

    await keeper.start()
    try:
        await server.serve(deps, ready=ready)
    finally:
        await keeper.close()
        sink.close()
        registry.close()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.argv[1])))
