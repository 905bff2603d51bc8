"""Owners of admission and their workers, for tests: started, ended and started again at will."""

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gateway import asks, dependencies, local_room, settings, waiting
from gateway.admission import dialing, place, remote, rooms
from scheduler.contracts import clock, errors, fleet, ids, ports, quota, requests, usage
from tests.unit.gateway import fleets, harness

I, B = requests.Tier.INTERACTIVE, requests.Tier.BATCH  # noqa: E741 - tiers
TOKEN = "t0ken"


def ask(name: str, tier: requests.Tier = I, model: str = "chat", **fields: Any) -> asks.Asking:
    return asks.of(
        requests.InferenceRequest(
            request_id=ids.RequestId(name),
            endpoint=requests.Endpoint.CHAT,
            body=harness.chat_body(),
            model=model,
            tier=tier,
            caller=harness.ANN,
            stream=False,
            arrived_us=clock.SystemClock().wall_us(),
            **fields,
        )
    )


class Book:
    """Quotas that remember what is held and what was settled."""

    def __init__(self) -> None:
        self.held: dict[str, quota.Claim] = {}
        self.adopted: list[str] = []
        self.settled: list[tuple[str, quota.Spent]] = []

    def reserve(self, claim: quota.Claim) -> quota.Hold:
        if claim.team == "poor":
            raise errors.QuotaExceeded("used up", retry_after_s=7.0)
        self.held[claim.request_id] = claim
        return _Hold(self, claim.request_id)

    def adopt(self, claim: quota.Claim) -> quota.Hold:
        self.adopted.append(claim.request_id)
        return self.reserve(claim)


@dataclasses.dataclass
class _Hold:
    book: Book
    name: str

    def headers(self, now_us: int) -> quota.Headers:
        return ()

    def settle(self, spent: quota.Spent, now_us: int) -> None:
        if self.book.held.pop(self.name, None) is not None:
            self.book.settled.append((self.name, spent))


def dependencies_of(view: fleet.FleetView, book: Book | None = None, **options: Any) -> Any:
    return dependencies.Dependencies(
        settings.GatewaySettings(**options),
        ports.StaticKeys(harness.KEYS),
        ports.StaticFleet(view),
        usage.MemorySink(),
        clock.SystemClock(),
        "c1",
        quotas=book or quota.Unlimited(),
    )


class House:
    """An owner that can be ended and started again, and workers of it."""

    def __init__(self, folder: Path, view: fleet.FleetView, **options: Any) -> None:
        self.path = folder / "admission.sock"
        self.view = view
        self.options = options
        self.book = Book()
        self.stack = contextlib.AsyncExitStack()
        self._owner: tuple[asyncio.Task[None], asyncio.Event] | None = None
        self.room: local_room.LocalRoom

    async def start(self, workers: int = 0) -> None:
        self.book = Book()
        deps = dependencies_of(self.view, self.book, **self.options)
        where = place.Place("g1", TOKEN, owns=True, socket=str(self.path), workers=workers)
        deps = dataclasses.replace(deps, place=where)
        up, stop = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with rooms.joined(deps) as admission:
                assert admission.own is not None
                self.room = admission.own
                running = asyncio.create_task(self.room.run())
                up.set()
                await stop.wait()
                running.cancel()
                await asyncio.wait({running})

        self._owner = asyncio.create_task(serve()), stop
        await up.wait()

    async def end(self) -> None:
        if self._owner is not None:
            task, stop = self._owner
            self._owner = None
            stop.set()
            await task

    @contextlib.asynccontextmanager
    async def worker(self, token: str = TOKEN, **options: Any) -> AsyncIterator[remote.RemoteRoom]:
        deps = dependencies_of(self.view, **{**self.options, **options})
        room = remote.RemoteRoom(deps, dialing.unix(str(self.path)), token, "w")
        running = asyncio.create_task(room.run())
        try:
            yield room
        finally:
            running.cancel()
            await asyncio.wait({running})


@contextlib.asynccontextmanager
async def house(view: fleet.FleetView, **options: Any) -> AsyncIterator[House]:
    with tempfile.TemporaryDirectory() as folder:
        made = House(Path(folder), view, **options)
        await made.start()
        try:
            yield made
        finally:
            await made.end()


async def turn(room: waiting.Room, waiter: waiting.Waiter) -> waiting.Grant:
    return await asyncio.wait_for(room.wait(waiter), 20)


ONE = fleets.make_view([fleets.make_replica("r1", seats=1)])
