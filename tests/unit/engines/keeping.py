"""A keeper at work in a slot of two GPUs: its process is played by the test, its HTTP side is real."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

from engines import private, settings
from engines.replica import app, engine, server, state
from engines.slot import children, control, keeper, means, occupancy, spec, wanted
from engines.weights import stager
from scheduler.contracts import clock, fleet, usage
from tests.unit.engines import scripted

PATIENCE_S = 10.0


class FakeChild:
    """A process that ends when the test, or a signal that it heeds, says so."""

    def __init__(self, order: children.Order, heeds: tuple[int, ...]) -> None:
        self.order = order
        self.heeds = heeds
        self.signals: list[int] = []
        self.pid = os.getpid()
        self.over: asyncio.Future[children.Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> children.Exit:
        return await asyncio.shield(self.over)

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number in self.heeds:
            self.end(0 if number == signal.SIGTERM else -number)

    def end(self, code: int, reason: str = "") -> None:
        if not self.over.done():
            self.over.set_result(children.Exit(code, reason))


class FakeStarter:
    def __init__(self, *heeds: int) -> None:
        self.heeds = heeds
        self.error: Exception | None = None
        self.child: asyncio.Future[FakeChild] = asyncio.get_running_loop().create_future()

    def again(self) -> None:
        """Expect another process."""
        self.child = asyncio.get_running_loop().create_future()

    def start(self, order: children.Order) -> children.Child:
        if self.error is not None:
            raise self.error
        child = FakeChild(order, self.heeds)
        self.child.set_result(child)
        return child


@dataclasses.dataclass
class Play:
    """A keeper at work."""

    one: keeper.Keeper
    starter: FakeStarter
    task: "asyncio.Task[None]"
    news: asyncio.Event

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.one.report()):
                self.news.clear()
                await self.news.wait()
        return self.one.report()

    async def end(self) -> Any:
        await asyncio.wait_for(self.task, PATIENCE_S)
        return self.one.report()


WISH = wanted.Wish(fleet.Role.SHARED, True, 5.0)


@contextlib.asynccontextmanager
async def play(
    folder: Path,
    *heeds: int,
    wish: wanted.Wish = WISH,
    kind: fleet.EngineKind = fleet.EngineKind.SIMULATED,
    error: Exception | None = None,
    time: clock.Clock | None = None,
    provider: stager.Provider | None = None,
    weights: str = "",
    **options: Any,
) -> AsyncIterator[Play]:
    """Run a keeper in a slot of two GPUs."""
    told = spec.SlotSpec(
        slot_id="l-1.s0",
        lease_id="l-1",
        cluster="c",
        slurm_job_id="7",
        agent_address="",
        agent_pid=0,
        agent_started=0,
        agent_machine="",
        token_file="",
        run_dir=str(private.folder(folder / "run")),
        log_dir=str(folder),
        gpus=2,
        replica_argv=(),
        sink_factory="",
        options=settings.EnginesSettings(
            gpu_lock_dir=folder / "gpus", **{"stats_s": 0.02, "term_s": 0.1, **options}
        ),
    )
    starter = FakeStarter(*(heeds or (signal.SIGTERM, signal.SIGKILL)))
    starter.error = error
    news = asyncio.Event()
    async with control.client() as session:
        given = means.Means(
            slot=told,
            node="n1",
            host="127.0.0.1",
            gpus={"0": "6", "1": "7"},
            held=dict,
            starter=starter,
            session=session,
            notes=occupancy.Occupancy(folder / "gpus", "n1"),
            stager=provider or stager.Stager(told.options, folder / "weights"),
            time=time or clock.SystemClock(),
            changed=lambda _: news.set(),
        )
        what = fleet.ReplicaSpec("m", "1", kind, weights, gpus=2)
        one = keeper.Keeper("r-1", what, wish, given)
        task = asyncio.create_task(one.run())
        task.add_done_callback(lambda _: news.set())
        try:
            yield Play(one, starter, task, news)
        finally:
            task.cancel()
            await asyncio.wait({task})


class Sick(scripted.Scripted):
    """An engine whose health a test sets."""

    step_ms = 0.0

    def __init__(self) -> None:
        super().__init__(scripted.endless)
        self.steps = 1

    def stats(self) -> engine.EngineStats:
        return engine.EngineStats(
            steps_total=self.steps, step_ms=self.step_ms, failure=self.failure
        )


@contextlib.asynccontextmanager
async def listening(child: FakeChild, incarnation: int = 1) -> AsyncIterator[Sick]:
    """Listen as the replica, and tell the keeper where."""
    inner = Sick()
    secret = private.read(Path(child.order.record.secret_file))
    about = state.About(replica_id="r-1")
    options = app.Options(secret, child.order.record.role, 4, 1, about)
    served = app.build(inner, options, sink=usage.MemorySink(), time=clock.SystemClock())
    async with contextlib.AsyncExitStack() as stack:
        with mock.patch.object(server, "GRACE_S", 0.1):  # for calls that hang when a test ends
            address, _ = await stack.enter_async_context(server.listening(served, "127.0.0.1"))
        child.order.heard({"phase": "weights", "seconds": 1.5})
        child.order.heard(
            {"address": address, "incarnation": incarnation, "phases_s": {"engine": 2.0}}
        )
        yield inner


async def ask(address: str, secret: str) -> None:
    """Keep a request running for ever."""
    async with (
        control.client() as session,
        session.post(
            f"http://{address}/v1/completions",
            json={"prompt": "x"},
            headers={"authorization": f"Bearer {secret}"},
        ) as response,
    ):
        await response.read()
