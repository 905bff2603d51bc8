"""A gateway's way to the broker: the newest view of the fleet, kept when the broker is gone."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from grpc import aio

from scheduler.contracts import clock, fleet, wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.runtime import address, entries, guard

log = logging.getLogger(__name__)
REPORT_S = 0.2
TRIALS_MOST = 2_000
LOOK_S = 1.0  # between two looks at whether another broker leads
RETRY_S = 0.2
RETRY_MOST_S = 2.0


class FleetClient:
    """`ports.FleetSource` over the broker's Fleet service.

    Reconnects by itself, reading broker.json anew each time. While no broker answers, the last view
    stays; a view of an older epoch than the newest is ignored. A broker that broker.json no longer
    names is left, though the call to it still stands: one that is stopped hangs up on nobody.

    Args:
        state_dir: the state folder, with broker.json and the control token.
        gateway_id: this worker's name, for the broker's books.
        time: for the age of views and reports.
    """

    def __init__(self, state_dir: Path, gateway_id: str, time: clock.Clock) -> None:
        self._state_dir = state_dir
        self._gateway_id = gateway_id
        self._time = time
        self._view: fleet.FleetView | None = None
        self._bell = entries.Bell()
        self._demand: tuple[fleet.Demand, ...] = ()
        self._trials: list[fleet.Trial] = []
        self._task: asyncio.Task[None] | None = None
        self.connected = False
        self.admission = ""  # where other hosts' workers find our queues, once that is known

    def start(self) -> None:
        """Begin to connect; call it on the event loop."""
        self._task = asyncio.create_task(self.run())

    async def close(self) -> None:
        """Leave; the view stays readable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def view(self) -> fleet.FleetView | None:
        """Return the newest view, None before the first."""
        return self._view

    async def changed(self, after: int) -> None:
        """Return once the view's revision is other than ``after``."""
        while self._view is None or self._view.revision == after:
            await self._bell.wait()

    def report(self, demand: Sequence[fleet.Demand]) -> None:
        """Offer the newest demand; the next report carries it."""
        self._demand = tuple(demand)

    def tell(self, trials: Sequence[fleet.Trial]) -> None:
        """Offer how requests fared; those that no broker has heard for long are dropped."""
        self._trials += trials
        del self._trials[:-TRIALS_MOST]

    async def run(self) -> None:
        """Connect, watch, and connect again, until cancelled."""
        pause = RETRY_S
        while True:
            where = address.read(self._state_dir)
            if where is not None:
                try:
                    await self._watch(where)
                    pause = RETRY_S
                except (aio.AioRpcError, OSError, ValueError) as error:
                    why = error.details() if isinstance(error, aio.AioRpcError) else str(error)
                    log.info("broker at %s: %s; trying again", where.address, why)
                except Exception:
                    # Whatever it is, a gateway without a way to the next broker would be worse.
                    log.exception("broker at %s: trying again", where.address)
            if self.connected:
                pause = RETRY_S
            self.connected = False
            await asyncio.sleep(pause)
            pause = min(RETRY_MOST_S, pause * 2)

    async def _watch(self, where: address.Address) -> None:
        async with aio.insecure_channel(where.address, options=wire.CHANNEL_OPTIONS) as channel:
            stub = control_pb2_grpc.FleetStub(channel)
            token = await asyncio.to_thread(guard.token, self._state_dir)
            call = stub.Watch(self._reports(), metadata=guard.metadata(token))
            replaced = asyncio.create_task(self._replaced(where))
            replaced.add_done_callback(lambda _: call.cancel())
            try:
                async for message in call:
                    self.connected = True
                    self._take(message)
            except asyncio.CancelledError:
                if _ending():
                    raise
                log.info("broker at %s was replaced", where.address)
            finally:
                replaced.cancel()
                await asyncio.gather(replaced, return_exceptions=True)
                call.cancel()

    async def _replaced(self, where: address.Address) -> None:
        """Return once another broker leads than the one at ``where``."""
        here = self._state_dir
        while await asyncio.to_thread(address.read, here) in {None, where}:  # noqa: ASYNC110 - a file rings no bell
            await asyncio.sleep(LOOK_S)

    async def _reports(self) -> AsyncIterator[pb.GatewayReport]:
        while True:
            trials, self._trials = self._trials, []
            yield pb.GatewayReport(
                gateway_id=self._gateway_id,
                at_us=self._time.wall_us(),
                demand=[wire.demand_to_pb(item) for item in self._demand],
                routes_revision=self._view.revision if self._view is not None else 0,
                admission=self.admission,
                trials=[wire.trial_to_pb(trial) for trial in trials],
            )
            await asyncio.sleep(REPORT_S)

    def _take(self, message: pb.FleetView) -> None:
        if self._view is not None and message.epoch < self._view.epoch:
            return
        with contextlib.suppress(ValueError):  # a word of a newer release: keep what is known
            self._view = wire.view_from_pb(message, self._time.monotonic())
            self._bell.ring()


def _ending() -> bool:
    """Return whether it is this task that was cancelled, and not a call that it reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
