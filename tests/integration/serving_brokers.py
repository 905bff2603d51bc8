"""Brokers of one state folder on real time, each a task."""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

from scheduler.contracts import clock
from scheduler.runtime import broker, loop, serving, settings
from tests import brokersite, fakeslurm, registries

OPTIONS = settings.Settings(
    tick_s=0.05, slurm_poll_s=0.1, adopt_grace_s=0.0, leader_ttl_s=30.0, leader_renew_s=0.1
)


def parts(folder: Path) -> broker.Parts:
    time = clock.SystemClock()
    return broker.Parts(
        options=OPTIONS,
        registry=registries.opened(folder),
        slurm=fakeslurm.FakeSlurm(time),
        lease_renderer=brokersite.render,
        state_dir=folder,
        time=time,
        cluster="alpha",
        models=(dataclasses.replace(brokersite.CHAT, replicas=0),),
    )


class Brokers:
    """Brokers of one state folder, each a task; `lead` is set each time one begins to lead."""

    def __init__(self, folder: Path, *works: loop.Periodic) -> None:
        self.parts = parts(folder)
        self.works = works
        self.leading: asyncio.Queue[str] = asyncio.Queue()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        task = serving.serve(
            self.parts, periodic=self.works, ready=lambda where: self.leading.put_nowait(name)
        )
        self.tasks[name] = asyncio.create_task(task)

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def close(self) -> None:
        for name in list(self.tasks):
            await self.stop(name)
        self.parts.registry.close()
