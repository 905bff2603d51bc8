"""A batch runner, its store and routes, and a scripted gateway."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from batch_jobs import model, results
from tests.unit.batch_jobs import world


@dataclasses.dataclass
class Stage:
    state_dir: Path
    store: world.TellingStore
    gateway: world.ScriptedGateway
    api: world.AppApi

    async def submit(self, data: bytes, **wish: object) -> int:
        return await asyncio.to_thread(self.api.submit, data, **wish)

    async def run(self, data: bytes, **wish: object) -> model.BatchJob:
        job_id = await self.submit(data, **wish)
        async with world.daemon_running(self.store, self.state_dir, self.gateway.url):
            return await self.store.ended(job_id)

    def runner(self, **changes: Any) -> AbstractAsyncContextManager[asyncio.Task[None]]:
        """Run the batch runner, with other settings."""
        options = dataclasses.replace(world.QUICK, **changes)
        return world.daemon_running(self.store, self.state_dir, self.gateway.url, options)

    def output(self, job_id: int) -> list[dict[str, Any]]:
        return world.file_lines(self.state_dir, job_id, results.OUTPUT)

    def errors(self, job_id: int) -> list[dict[str, Any]]:
        return world.file_lines(self.state_dir, job_id, results.ERRORS)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    store = world.open_store(tmp_path)
    async with world.ScriptedGateway().running() as gateway:
        yield Stage(tmp_path, store, gateway, world.AppApi(store, tmp_path))
    store.close()
