"""Forebay as the gateway bench runs it: a site's own gateway process, on a fleet that stands still.

Everything is what `forebay gateway` starts (registry with an API key, spool on disk, quotas, metrics);
only the view of the fleet does not come from a broker but from here, told anew each 200 ms as a broker
tells it, with fresh statistics. Usage: ``gateway_forebay.py FOLDER ADDRESS…``; prints one JSON line.
"""

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from forebay import config as configs
from forebay import doors, installation, lifeline
from scheduler.contracts import clock, fleet, ids, ports, requests
from scheduler.runtime import client
from scheduler.runtime.registry import keys

SEATS = 512
_TELL_S = 0.2


class StandingFleet(ports.StaticFleet):
    """Takes `scheduler.runtime.client.FleetClient`'s place."""

    def __init__(self, addresses: Sequence[str], secret_file: Path) -> None:
        super().__init__()
        self._replicas = [
            fleet.Replica(
                replica_id=ids.ReplicaId(f"r-{number:012x}"),
                cluster="bench",
                lease_id=ids.LeaseId("l-bench"),
                slot_id=ids.SlotId(f"l-bench.s{number}"),
                slurm_job_id="1",
                node="n1",
                spec=fleet.ReplicaSpec(
                    "chat", "1", fleet.EngineKind.VLLM, seats=SEATS, max_context=200_000
                ),
                state=fleet.ReplicaState.SERVING,
                role=fleet.Role.SHARED,
                address=address,
                incarnation=1,
                secret_file=str(secret_file),
            )
            for number, address in enumerate(addresses)
        ]
        self._revision = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._task = asyncio.create_task(self._tell())

    async def close(self) -> None:
        """Tell no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _tell(self) -> None:
        time = clock.SystemClock()
        while True:
            self._revision += 1
            stats = fleet.ReplicaStats(
                at_us=time.wall_us(), seats=SEATS, kv_blocks=1_000_000, kv_free=900_000
            )
            replicas = tuple(dataclasses.replace(each, stats=stats) for each in self._replicas)
            route = fleet.Route("chat", {"1": 100}, max_context=200_000)
            self.set(
                fleet.FleetView(1, self._revision, {"chat": route}, replicas, time.monotonic())
            )
            await asyncio.sleep(_TELL_S)


class Site:
    """A site's installation in ``folder``: what `forebay gateway` needs of it.

    Attributes:
        token: an API key.
    """

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        lifeline.open_files()
        os.environ["FOREBAY_FOREBAY_STATE_DIR"] = str(folder / "state")
        for name, value in (("HTTP_PORT", "0"), ("GRPC_PORT", "0")):
            os.environ[f"FOREBAY_GATEWAY_{name}"] = value
        os.environ["FOREBAY_SLURM_CLIENT"] = "embedded"
        self._here = installation.Installation.open(configs.load(None))
        registry = self._here.open_registry()
        wish = keys.Key("", "physics", "ann", (requests.Tier.INTERACTIVE,))
        self.token = registry.keys.create(wish, clock.SystemClock().wall_us())[1]
        registry.close()
        secret = folder / "replica.secret"
        secret.write_text("bench")

        def standing(*_: Any) -> StandingFleet:
            return StandingFleet(addresses, secret)

        client.FleetClient = standing  # type: ignore[misc,assignment]  # all that differs from a site

    def run(self, told: doors.Told) -> Coroutine[Any, Any, None]:
        """Serve until SIGTERM."""
        return doors.gateway(self._here, told)


def main(folder: Path, addresses: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    site = Site(folder, addresses)

    def told(news: Mapping[str, str]) -> None:
        print(json.dumps({**news, "token": site.token}), flush=True)

    uvloop.run(site.run(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
