"""The broker's side of the gateways' link: demand comes in, the fleet's newest view goes out."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from scheduler.contracts import clock, observed, wire, wire_told
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.runtime import agents, guard, live, settings, snapshots

log = logging.getLogger(__name__)
COALESCE_S = 0.05  # agents report each 200 ms: no gateway needs more than every fourth of that


class Fleet(control_pb2_grpc.FleetServicer):
    """One call for each gateway worker.

    Nothing is sent before a new leader has settled: an early view would take away replicas whose
    agents have not come back yet, and gateways serve on with what they have.
    """

    def __init__(
        self,
        picture: live.Live,
        time: clock.Clock,
        keeper: guard.Guard,
        options: settings.Settings,
    ) -> None:
        self._live = picture
        self._time = time
        self._guard = keeper
        self._options = options
        self._encoded: tuple[int, pb.FleetView] | None = None
        self._links: dict[str, object] = {}  # by gateway, the newest

    async def Watch(  # noqa: N802 - the name is gRPC's
        self, request_iterator: AsyncIterator[pb.GatewayReport], context: Any
    ) -> AsyncIterator[pb.FleetView]:
        """Send the view whenever it has changed; take demand as it comes."""
        await self._guard.check(context)
        gone = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, gone))
        sent = -1
        try:
            while not gone.is_set():
                rung = self._live.bell.current()
                if self._live.settled and self._live.revision != sent:
                    view = self._view()
                    yield view
                    sent = view.revision
                    await asyncio.sleep(COALESCE_S)
                    continue
                await agents.either(rung, gone)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, reports: AsyncIterator[pb.GatewayReport], gone: asyncio.Event) -> None:
        gateway_id, me, odd = "", object(), ""
        try:
            async for report in reports:
                gateway_id = report.gateway_id
                self._links[gateway_id] = me
                self._live.gateways.heard(gateway_id, report.admission, self._time.monotonic())
                try:
                    self._take(report)
                    odd = ""
                except Exception as error:
                    # The next report is whole again; without the link the gateway would lose its view too.
                    self._live.reports_refused += 1
                    if str(error) != odd:
                        log.exception("gateway %s: a report is left out", gateway_id)
                    odd = str(error)
        finally:
            # Else it has come back before the end of this link was seen.
            if self._links.get(gateway_id) is me:
                del self._links[gateway_id]
                self._live.forget_gateway(gateway_id)
                self._live.gateways.left(gateway_id, self._time.monotonic())
            gone.set()

    def _take(self, report: pb.GatewayReport) -> None:
        """Take a report, all that is in it or nothing."""
        demand: dict[str, observed.Demand] = {
            item.model: wire_told.demand_from_pb(item) for item in report.demand
        }
        trials = [wire_told.trial_from_pb(item) for item in report.trials]
        copies = [wire_told.copied_from_pb(item) for item in report.copies]
        dropped = [wire_told.dropped_from_pb(item) for item in report.copies_dropped]
        self._live.absorb_demand(report.gateway_id, demand, self._time.monotonic())
        self._live.trials.extend(trials)
        self._live.shadows.note(self._live.routes, copies, dropped)

    def _view(self) -> pb.FleetView:
        """Return the newest view's message, encoded once for all gateways."""
        if self._encoded is None or self._encoded[0] != self._live.revision:
            view = snapshots.view(self._live, self._time, self._options)
            self._encoded = (view.revision, wire.view_to_pb(view))
        return self._encoded[1]
