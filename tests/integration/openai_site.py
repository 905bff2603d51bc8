"""The OpenAI Batch API before a real gateway and a scripted replica, for the official client."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai

from batch_jobs import openai_api, routes
from scheduler.contracts import clock, ports, requests
from tests.unit.batch_jobs import world
from tests.unit.gateway import harness

CAROL = requests.Caller("physics", "carol", "key-carol", tuple(requests.Tier), coordinator=True)
DAN = requests.Caller("physics", "dan", "key-dan", tuple(requests.Tier))
ROOT = requests.Caller("ops", "root", "key-root", tuple(requests.Tier), admin=True)
EVE = requests.Caller("chem", "eve", "key-eve", tuple(requests.Tier))
KEYS = {**harness.KEYS, "carol": CAROL, "dan": DAN, "root": ROOT, "eve": EVE}
ENDPOINT: Any = "/v1/chat/completions"


@dataclasses.dataclass
class Site:
    state_dir: Path
    store: world.TellingStore
    served: harness.Served
    options: Any

    def client(self, key: str = "ann") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url=f"{self.served.http}/v1", max_retries=0, timeout=30
        )

    def runner(self, **changes: Any) -> contextlib.AbstractAsyncContextManager[asyncio.Task[None]]:
        options = dataclasses.replace(world.QUICK, **changes)
        return world.daemon_running(
            self.store, self.state_dir, self.served.http, options, key="svc"
        )


@contextlib.asynccontextmanager
async def site(
    tmp_path: Path, script: harness.Script = harness.hello, **changes: Any
) -> AsyncIterator[Site]:
    store = world.open_store(tmp_path)
    options = dataclasses.replace(world.QUICK, **changes)
    time = clock.SystemClock()
    routers = tuple(
        each.router(store, state_dir=tmp_path, options=options, clock=time)
        for each in (routes, openai_api)
    )
    async with harness.one_replica(
        script, routers=routers, authenticator=ports.StaticKeys(KEYS)
    ) as (served, _):
        yield Site(tmp_path, store, served, options)
    store.close()


async def until(
    client: openai.AsyncOpenAI, batch_id: str, holds: Callable[[Any], bool]
) -> openai.types.Batch:
    async with asyncio.timeout(30):
        while True:
            found = await client.batches.retrieve(batch_id)
            if holds(found):
                return found
            await asyncio.sleep(0.02)


def ended(batch: Any) -> bool:
    return batch.status in {"completed", "failed", "expired", "cancelled"}


async def submit(client: openai.AsyncOpenAI, data: bytes, **more: Any) -> openai.types.Batch:
    file = await client.files.create(file=("requests.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", **more
    )
