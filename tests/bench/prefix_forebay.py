"""Forebay as the prefix bench runs it: a site's gateway process on real replicas that stand still.

As in `gateway_forebay`, only the view of the fleet comes from here; the statistics in it are the replicas'
own, asked for each 200 ms as a slot's supervisor asks. With ``FOREBAY_BENCH_ENDPOINTS`` (one for each
replica, comma between them) the index hears their KV events instead. Usage: ``prefix_forebay.py FOLDER
SECRET_FILE SEATS ADDRESS…``; prints one JSON line.
"""

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from engines import tinymodel
from forebay import config as configs
from forebay import doors, installation, lifeline
from gateway import fingerprints
from scheduler.contracts import clock, fleet, ids, ports, requests
from scheduler.core import prefixes, router
from scheduler.runtime import client
from scheduler.runtime.registry import keys
from tests.bench import prefix_events, prefix_workload

ENDPOINTS = "FOREBAY_BENCH_ENDPOINTS"
_TELL_S = 0.2


class StandingFleet(ports.StaticFleet):
    """Takes `scheduler.runtime.client.FleetClient`'s place."""

    def __init__(self, addresses: Sequence[str], secret_file: Path, seats: int) -> None:
        super().__init__()
        self._secret = secret_file.read_text(encoding="ascii").strip()
        self._replicas = [
            fleet.Replica(
                replica_id=ids.ReplicaId(f"r-{number:012x}"),
                cluster="bench",
                lease_id=ids.LeaseId("l-bench"),
                slot_id=ids.SlotId(f"l-bench.s{number}"),
                slurm_job_id="1",
                node="n1",
                spec=fleet.ReplicaSpec(
                    "chat",
                    "1",
                    fleet.EngineKind.VLLM,
                    seats=seats,
                    reserved_seats=0,  # as the replicas were started
                    max_context=tinymodel.CONTEXT,
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
        self._listening: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to tell."""
        self._task = asyncio.create_task(self._tell())
        endpoints = [each for each in os.environ.get(ENDPOINTS, "").split(",") if each]
        if endpoints:
            blocks = {replica.replica_id: prefix_events.Blocks() for replica in self._replicas}
            _hear(blocks)
            for endpoint, each in zip(endpoints, blocks.values(), strict=True):
                task = asyncio.create_task(prefix_events.listen(endpoint, each))
                self._listening.append(task)

    async def close(self) -> None:
        """Tell no more."""
        tasks = [task for task in (self._task, *self._listening) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _tell(self) -> None:
        time = clock.SystemClock()
        headers = {"Authorization": f"Bearer {self._secret}"}
        async with aiohttp.ClientSession(trust_env=False, headers=headers) as session:
            while True:
                replicas = await asyncio.gather(*(_asked(session, r) for r in self._replicas))
                self._revision += 1
                route = fleet.Route("chat", {"1": 100}, max_context=tinymodel.CONTEXT)
                self.set(
                    fleet.FleetView(
                        1, self._revision, {"chat": route}, tuple(replicas), time.monotonic()
                    )
                )
                await asyncio.sleep(_TELL_S)


def _hear(blocks: Mapping[ids.ReplicaId, prefix_events.Blocks]) -> None:
    """Put an index that knows the replicas' blocks in the place of the one that predicts them."""
    seen: dict[int, list[int]] = {}
    of = fingerprints.of

    def remembering(request: requests.InferenceRequest, chunk_bytes: int) -> prefixes.Prefix:
        prefix = of(request, chunk_bytes)
        if prefix.chain:
            seen[prefix.chain[-1]] = prefix_workload.token_ids(request.body["prompt"])
        return prefix

    def tokens(prefix: prefixes.Prefix) -> Sequence[int]:
        return seen.get(prefix.chain[-1], ()) if prefix.chain else ()

    size = prefix_workload.BLOCK_TOKENS
    index = prefix_events.EventIndex(blocks, tokens, size, prefix_workload.CHUNK_BYTES)
    fingerprints.of = remembering  # type: ignore[assignment]
    router.Router.index = lambda self, model: index  # type: ignore[method-assign]


async def _asked(session: aiohttp.ClientSession, replica: fleet.Replica) -> fleet.Replica:
    """Return the replica with its newest statistics."""
    async with session.get(f"http://{replica.address}/forebay/state") as answer:
        said: dict[str, Any] = (await answer.json())["stats"]
    said["reclaim_ms"] = tuple(said["reclaim_ms"])
    return dataclasses.replace(replica, stats=fleet.ReplicaStats(**said))


def main(folder: Path, secret_file: Path, seats: int, addresses: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    lifeline.open_files()
    os.environ["FOREBAY_FOREBAY_STATE_DIR"] = str(folder / "state")
    for name, value in (
        ("HTTP_PORT", "0"),
        ("GRPC_PORT", "0"),
        ("PREFIX_CHUNK_BYTES", str(prefix_workload.CHUNK_BYTES)),
    ):
        os.environ[f"FOREBAY_GATEWAY_{name}"] = value
    os.environ["FOREBAY_SLURM_CLIENT"] = "embedded"
    here = installation.Installation.open(configs.load(None))
    registry = here.open_registry()
    wish = keys.Key("", "physics", "ann", (requests.Tier.INTERACTIVE,))
    token = registry.keys.create(wish, clock.SystemClock().wall_us())[1]
    registry.close()

    def standing(*_: Any) -> StandingFleet:
        return StandingFleet(addresses, secret_file, seats)

    client.FleetClient = standing  # type: ignore[misc,assignment]  # all that differs from a site

    def told(news: Mapping[str, str]) -> None:
        print(json.dumps({**news, "token": token}), flush=True)

    uvloop.run(doors.gateway(here, told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
