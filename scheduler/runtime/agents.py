"""The broker's side of the agents' link: reports come in and are merged, desired states go out."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from scheduler.contracts import clock, ids
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.runtime import guard, live

log = logging.getLogger(__name__)


class AgentLink(control_pb2_grpc.AgentLinkServicer):
    """One call for each lease's agent; a newer call of the same lease ends the older one."""

    def __init__(self, picture: live.Live, time: clock.Clock, keeper: guard.Guard) -> None:
        self._live = picture
        self._time = time
        self._guard = keeper

    async def Connect(  # noqa: N802 - the name is gRPC's
        self, request_iterator: AsyncIterator[pb.LeaseReport], context: Any
    ) -> AsyncIterator[pb.LeaseDesired]:
        """Merge reports as they come; send the desired state whenever it is another one."""
        await self._guard.check(context)
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        lease_id = ids.LeaseId(first.lease_id)
        me = object()
        gone = asyncio.Event()
        try:
            self._take(first, me, newest=True)  # before the loop looks whose link counts
        except ValueError as error:
            self._left(lease_id, me)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"report: {error}")
        reader = asyncio.create_task(self._read(lease_id, request_iterator, me, gone))
        try:
            sent: pb.LeaseDesired | None = None
            while not gone.is_set():
                rung = self._live.wishes.current()
                entry = self._live.leases.get(lease_id)
                if entry is not None and entry.connection not in {None, me}:
                    break
                wanted = self._live.desired(lease_id)
                if wanted is not None and wanted != sent:
                    yield wanted
                    sent = wanted
                    continue  # it may have changed while it was sent
                await either(rung, gone)
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            self._left(lease_id, me)
        fault = None if reader.cancelled() else reader.exception()
        if isinstance(fault, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"report: {fault}")

    def _left(self, lease_id: ids.LeaseId, me: object) -> None:
        entry = self._live.leases.get(lease_id)
        if entry is not None and entry.connection is me:
            entry.connection = None
            self._live.hung_up.add(lease_id)
            self._live.heard.ring()

    async def _read(
        self,
        lease_id: ids.LeaseId,
        rest: AsyncIterator[pb.LeaseReport],
        me: object,
        gone: asyncio.Event,
    ) -> None:
        try:
            async for report in rest:
                if report.lease_id != lease_id:
                    raise ValueError(f"this link is of lease {lease_id}")
                self._take(report, me, newest=False)
        finally:
            gone.set()

    def _take(self, report: pb.LeaseReport, me: object, *, newest: bool) -> None:
        entry = self._live.leases.get(ids.LeaseId(report.lease_id))
        if entry is not None:
            if newest or entry.connection is None:
                entry.connection = me
                self._live.wishes.ring()
            elif entry.connection is not me:
                return
        try:
            self._live.absorb_report(report, self._time.monotonic())
        except ValueError:
            raise
        except Exception as error:
            log.exception("lease %s: report", report.lease_id)
            raise ValueError(f"{type(error).__name__}: {error}") from error


async def either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Return when one of two events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
