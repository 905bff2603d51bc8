"""A gateway's parts, put together and kept running: what HTTP and gRPC both stand on."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from gateway import dependencies, local_room, metrics, replica, requestpath
from scheduler.contracts import fleet


@dataclasses.dataclass(frozen=True, slots=True)
class Gateway:
    """The running parts of one gateway worker."""

    deps: dependencies.Dependencies
    room: local_room.LocalRoom
    path: requestpath.RequestPath
    metrics: metrics.Metrics

    def demand(self) -> list[fleet.Demand]:
        """Return what waits and runs now, by model."""
        return [
            fleet.Demand(
                model=model,
                waiting=self.room.waiting(model),
                in_flight=self.room.loads.by_tier(model),
                oldest_wait_s=self.room.oldest_wait_s(model),
                ttft_ms=self.path.ttft_ms(model),
            )
            for model in sorted(self.room.models())
        ]

    async def report(self) -> None:
        """Tell the demand to the broker until cancelled."""
        while True:
            await self.deps.clock.sleep(self.deps.settings.report_s)
            self.deps.fleet.report(self.demand())


@contextlib.asynccontextmanager
async def running(deps: dependencies.Dependencies) -> AsyncIterator[Gateway]:
    """Keep a gateway's parts running; a part that fails ends the block with its error."""
    numbers = metrics.Metrics()
    async with replica.Client(deps.settings) as client:
        room = local_room.LocalRoom(deps)
        path = requestpath.RequestPath(deps, room, client, numbers)
        gateway = Gateway(deps, room, path, numbers)
        tasks = [asyncio.create_task(part()) for part in (room.run, path.run, gateway.report)]
        owner = asyncio.current_task()
        stopping = False

        def failed(task: "asyncio.Task[None]") -> None:
            if not stopping and owner is not None:
                owner.cancel()

        for task in tasks:
            task.add_done_callback(failed)
        try:
            yield gateway
        finally:
            stopping = True
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
