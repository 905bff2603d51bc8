"""The process that admits for the workers of one gateway: what it needs and nothing else.

No web server, no ledger, no Slurm: each costs a second of start, for which its workers' clients wait.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forebay import installation, quota_books
from gateway import dependencies
from gateway import settings as gateway_settings
from gateway.admission import place as places
from gateway.admission import process
from scheduler.contracts import clock, ports, usage
from scheduler.runtime import client, guard

Told = Callable[[Mapping[str, str]], None]
PLACE = "FOREBAY_ADMISSION"  # environment: how a gateway's processes find each other, see `placed`


def placed(gateway: str, socket_file: Path, workers: int) -> str:
    """Return what `PLACE` holds for the processes of one gateway."""
    return json.dumps({"gateway": gateway, "socket": str(socket_file), "workers": workers})


def name_of(table: gateway_settings.GatewaySettings) -> str:
    """Return this host's gateway as other hosts know it: the same after a restart on the same port."""
    return f"{socket.gethostname()}-{table.http_port or os.getpid()}"


def place(
    here: installation.Installation,
    table: gateway_settings.GatewaySettings,
    *,
    owns: bool,
    told: Callable[[str], None],
) -> places.Place:
    """Return how this process takes part in admission, as its environment says."""
    said: dict[str, Any] = json.loads(os.environ[PLACE])
    return places.Place(
        said["gateway"],
        guard.token(here.state),
        owns=owns,
        socket=said["socket"],
        listen=table.admission_listen,
        advertise=table.admission_advertise,
        workers=said["workers"],
        told=told,
    )


async def admission(here: installation.Installation, told: Told) -> None:
    """Own the queues of a gateway with several workers until SIGTERM."""
    table = here.config.table(gateway_settings.GatewaySettings)
    time = clock.SystemClock()
    fleet: client.FleetClient

    def tell(address: str) -> None:
        fleet.admission = address

    where = place(here, table, owns=True, told=tell)
    registry = await asyncio.to_thread(here.open_registry)
    try:
        fleet = client.FleetClient(here.state, where.gateway, time)
        fleet.start()
        try:
            keeper = quota_books.keeper(here, registry, time)
            await keeper.start()
            try:
                deps = dependencies.Dependencies(
                    settings=table,
                    authenticator=ports.StaticKeys({}),  # its workers have asked theirs
                    fleet=fleet,
                    sink=usage.MemorySink(),  # it records nothing
                    clock=time,
                    cluster="",
                    quotas=keeper.book,
                    place=where,
                    collectors=(keeper.numbers.registry,),
                )
                await process.serve(deps, ready=lambda: told({"admission": where.socket}))
            finally:
                await keeper.close()
        finally:
            await fleet.close()
    finally:
        registry.close()
