"""The agent's SlotLink server: slots report here and learn what they should hold."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from scheduler.contracts import wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc


class SlotLink(control_pb2_grpc.SlotLinkServicer):
    """One call for each slot; a newer call of the same slot ends the older one.

    Args:
        token: the bearer token that slots must show.
        reported: called with each report.
        desired: returns what a slot should hold now, or None if it is not known.
    """

    def __init__(
        self,
        token: str,
        reported: Callable[[pb.SlotReport], None],
        desired: Callable[[str], pb.SlotDesired | None],
    ) -> None:
        self._expected = f"Bearer {token}"
        self._reported = reported
        self._desired = desired
        self._news = asyncio.Event()
        self._calls: dict[str, object] = {}

    def changed(self) -> None:
        """Wake every call: what is desired has changed."""
        self._news.set()
        self._news = asyncio.Event()

    async def Connect(  # noqa: N802 - the name is gRPC's
        self, request_iterator: AsyncIterator[pb.SlotReport], context: Any
    ) -> AsyncIterator[pb.SlotDesired]:
        """Take reports as they come; send the desired state whenever it is another one."""
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not hmac.compare_digest(str(given).encode(), self._expected.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "SlotLink: wrong token")
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        slot_id = first.slot_id
        me = self._calls[slot_id] = object()
        self.changed()
        self._reported(first)
        ended = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, slot_id, me, ended))
        try:
            sent: pb.SlotDesired | None = None
            while not ended.is_set() and self._calls.get(slot_id) is me:
                news = self._news
                wanted = self._desired(slot_id)
                if wanted is not None and wanted != sent:
                    sent = pb.SlotDesired()
                    sent.CopyFrom(wanted)
                    yield sent
                    continue  # it may have changed while it was sent
                await _either(news, ended)
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            if self._calls.get(slot_id) is me:
                del self._calls[slot_id]

    async def _read(
        self,
        reports: AsyncIterator[pb.SlotReport],
        slot_id: str,
        me: object,
        ended: asyncio.Event,
    ) -> None:
        try:
            async for report in reports:
                if report.slot_id == slot_id and self._calls.get(slot_id) is me:
                    self._reported(report)
        finally:
            ended.set()


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def listen(servicer: SlotLink, host: str) -> tuple[grpc.aio.Server, str]:
    """Start the server on a port of the kernel's choice; returns it and its ``host:port``.

    Raises:
        RuntimeError: the address can't be bound.
    """
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    control_pb2_grpc.add_SlotLinkServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"
