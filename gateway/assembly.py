"""A gateway's parts, put together and kept running: what HTTP and gRPC both stand on."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from gateway import (
    apart,
    bodies,
    dependencies,
    measuring,
    metrics,
    replica,
    requestpath,
    waiting,
)
from gateway.admission import rooms


@dataclasses.dataclass(frozen=True, slots=True)
class Gateway:
    """The running parts of one gateway worker."""

    deps: dependencies.Dependencies
    room: waiting.Room
    path: requestpath.RequestPath
    metrics: metrics.Metrics
    bodies: bodies.Bodies
    apart: apart.Apart


@contextlib.asynccontextmanager
async def running(deps: dependencies.Dependencies) -> AsyncIterator[Gateway]:
    """Keep a gateway's parts running; a part that fails ends the block with its error."""
    numbers = metrics.Metrics()
    for collector in deps.collectors:
        numbers.registry.register(collector)
    async with replica.Client(deps.settings) as client, rooms.joined(deps) as admission:
        room = bodies.Bodies(deps.settings.bodies_limit)
        large = apart.Apart()
        measure = measuring.Measuring(large, deps.settings.prefix_chunk_bytes)
        path = requestpath.RequestPath(deps, admission.room, client, numbers, measure)
        gateway = Gateway(deps, admission.room, path, numbers, room, large)
        runs = [*(run() for run in admission.runs), path.run(), client.watch(deps.fleet)]
        if admission.own is not None:
            runs.append(rooms.report(deps, admission.own, numbers))
        tasks = [asyncio.ensure_future(run) for run in runs]
        owner = asyncio.current_task()
        stopping = False

        def failed(task: "asyncio.Future[None]") -> None:
            if not stopping and owner is not None:
                owner.cancel()

        for task in tasks:
            task.add_done_callback(failed)
        try:
            yield gateway
        finally:
            stopping = True
            large.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
