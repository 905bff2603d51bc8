"""A gateway's way to the broker: the newest view of the fleet, kept when the broker is gone."""

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from grpc import aio

from scheduler.contracts import clock, fleet, observed, wire, wire_told
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.runtime import address, entries, guard

log = logging.getLogger(__name__)
REPORT_S = 0.2
TRIALS_MOST = 2_000
COPIES_MOST = 1_000
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
        self._demand: tuple[observed.Demand, ...] = ()
        self._trials: list[observed.Trial] = []
        self._copies: list[observed.Copied] = []
        self._dropped: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unread = ""  # why the newest view can't be read, as it was logged
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

    def report(self, demand: Sequence[observed.Demand]) -> None:
        """Offer the newest demand; the next report carries it, at once if an adapter is newly waited for."""
        before, self._demand = _adapters(self._demand), tuple(demand)
        if _adapters(self._demand) - before:
            self._soon.set()

    def tell(self, trials: Sequence[observed.Trial]) -> None:
        """Offer how requests fared; those that no broker has heard for long are dropped."""
        self._trials += trials
        del self._trials[:-TRIALS_MOST]

    def compared(
        self, copies: Sequence[observed.Copied], dropped: Sequence[observed.CopiesDropped]
    ) -> None:
        """Offer how copies fared; those that no broker has heard for long are forgotten."""
        self._copies += copies
        del self._copies[:-COPIES_MOST]
        for one in dropped:
            self._dropped[one.model, one.shadow, one.reason] += one.count

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
            copies, self._copies = self._copies, []
            dropped, self._dropped = self._dropped, collections.Counter()
            yield pb.GatewayReport(
                gateway_id=self._gateway_id,
                at_us=self._time.wall_us(),
                demand=[wire_told.demand_to_pb(item) for item in self._demand],
                routes_revision=self._view.revision if self._view is not None else 0,
                admission=self.admission,
                trials=[wire_told.trial_to_pb(trial) for trial in trials],
                copies=[wire_told.copied_to_pb(copied) for copied in copies],
                copies_dropped=[
                    wire_told.dropped_to_pb(observed.CopiesDropped(*key, count))
                    for key, count in dropped.items()
                ],
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), REPORT_S)
            self._soon.clear()

    def _take(self, message: pb.FleetView) -> None:
        if self._view is not None and message.epoch < self._view.epoch:
            return
        try:
            self._view = wire.view_from_pb(message, self._time.monotonic())
        except ValueError as fault:  # of a newer release: what is known stays in force
            if str(fault) != self._unread:
                log.exception("the broker's view can't be read, the last one holds")
            self._unread = str(fault)
            return
        self._unread = ""
        self._bell.ring()


def _adapters(demand: Sequence[observed.Demand]) -> set[tuple[str, str]]:
    """Return the adapters that are waited for, by model and name."""
    return {
        (part.model, name)
        for part in demand
        for name, one in part.adapters.items()
        if one.waiting or one.batch
    }


def _ending() -> bool:
    """Return whether it is this task that was cancelled, and not a call that it reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
