"""A gateway and a replica of the simulated engine, each a process that may be killed and started again."""

import asyncio
import json
import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from engines.replica import app, server, state
from engines.simulated import core, replica
from scheduler.contracts import clock, fleet, ports, usage
from tests.unit.batch_jobs import world
from tests.unit.gateway import harness

world.PROCESSES.set_forkserver_preload(["tests.integration.batch_site"])
SEATS = 6
_TOLD = "replica.json"


def run_replica(folder: str, number: int, scale: float) -> None:
    """Be the replica, its ``number``th incarnation, until killed; tells its address in a file."""

    async def run() -> None:
        time = clock.SystemClock()
        inner = replica.Simulated(core.Options("chat", time_scale=scale), time)
        about = state.About(replica_id="r1")
        options = app.Options(harness.SECRET, fleet.Role.SHARED, SEATS, 1, about)
        served = app.build(inner, options, sink=usage.MemorySink(), time=time)
        async with inner.running(), server.listening(served, "127.0.0.1") as (address, ended):
            fresh = Path(folder) / f".{_TOLD}"
            fresh.write_text(json.dumps({"address": address, "incarnation": number}))
            fresh.replace(Path(folder) / _TOLD)
            await ended.wait()

    asyncio.run(run())


def run_gateway(folder: str, port: int) -> None:
    """Be the gateway until killed; takes the replica's newest incarnation for the fleet."""

    async def run() -> None:
        home = Path(folder)
        secret = home / "secret"
        secret.write_text(harness.SECRET)
        keys = ports.StaticKeys(harness.KEYS)
        told: dict[str, Any] = {}
        async with harness.gateway(None, authenticator=keys, http_port=port) as served:
            while True:
                path = home / _TOLD
                news = json.loads(path.read_text()) if path.exists() else {}
                if news and news != told:
                    told = news
                    found = harness.make_replica(
                        "r1",
                        address=told["address"],
                        incarnation=told["incarnation"],
                        secret_file=str(secret),
                        stats=fleet.ReplicaStats(at_us=1, seats=SEATS),
                    )
                    served.fleet.set(harness.make_view([found], told["incarnation"]))
                await asyncio.sleep(0.02)

    asyncio.run(run())


class Parts:
    """The processes of a site: gateway, replica, batch runner."""

    def __init__(self, folder: Path, port: int, job_id: int, scale: float) -> None:
        self._folder = folder
        self._port = port
        self._job_id = job_id
        self._scale = scale
        self._incarnation = 0
        self._running: dict[str, ForkServerProcess] = {}

    def start(self, part: str) -> None:
        """Start a part: gateway, replica or runner."""
        home = str(self._folder)
        url = f"http://127.0.0.1:{self._port}"
        if part == "replica":
            self._incarnation += 1
        target: Any
        target, arguments = {
            "gateway": (run_gateway, (home, self._port)),
            "replica": (run_replica, (home, self._incarnation, self._scale)),
            "runner": (run_runner, (home, url, self._job_id)),
        }[part]
        process = world.PROCESSES.Process(target=target, args=arguments)
        process.start()
        self._running[part] = process

    async def kill(self, part: str) -> None:
        """kill -9 a part."""
        process = self._running.pop(part)
        process.kill()
        await asyncio.to_thread(process.join, 10)

    async def close(self) -> None:
        """End what runs."""
        for part in list(self._running):
            await self.kill(part)


def run_runner(state_dir: str, url: str, job_id: int) -> None:
    """Be the batch runner, with the harness's service key, until the job has ended."""

    async def run() -> None:
        store = world.open_store(Path(state_dir))
        async with world.daemon_running(store, Path(state_dir), url, key="svc") as task:
            done = asyncio.create_task(store.ended(job_id))
            await asyncio.wait({done, task}, return_when=asyncio.FIRST_COMPLETED)
        store.close()

    asyncio.run(run())
    os._exit(0)
