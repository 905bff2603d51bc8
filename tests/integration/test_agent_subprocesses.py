"""Short commands beside live gRPC: all end, and no heartbeat is late."""

import asyncio
import time

import grpc.aio
import pytest

from engines import link
from scheduler.contracts import wire
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.contracts.v1 import control_pb2_grpc
from slurm_plugins import children
from tests.integration import lease_site

COMMANDS = 2_000


@pytest.mark.timeout(180)
async def test_two_thousand_short_commands_delay_no_heartbeat() -> None:
    broker = lease_site.Broker()
    broker.want(pb.LeaseDesired(epoch=1, revision=1, lease_id="l-1"))
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    control_pb2_grpc.add_AgentLinkServicer_to_server(broker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    taken: list[pb.LeaseDesired] = []
    ends: link.Ends[pb.LeaseReport, pb.LeaseDesired] = link.Ends(
        where=lambda: f"127.0.0.1:{port}",
        open_call=lambda channel: control_pb2_grpc.AgentLinkStub(channel).Connect,
        report=lambda: pb.LeaseReport(lease_id="l-1"),
        take=taken.append,
    )
    kept = link.Link(ends, lease_site.TOKEN, link.Pace(0.05, 0.2), "test")
    linked = asyncio.create_task(kept.run())
    try:
        await broker.until(lambda _: bool(taken))
        gate = asyncio.Semaphore(4)

        async def command() -> int:
            async with gate:
                return (await children.run(["true"], timeout_s=30.0)).code

        began = time.monotonic()
        codes = await asyncio.gather(*(command() for _ in range(COMMANDS)))
        ended = time.monotonic()
        assert codes == [0] * COMMANDS
        times = [at for at, _ in broker.reports if began - 1 <= at <= ended]
        gaps = [b - a for a, b in zip(times, [*times[1:], ended], strict=True)]
        assert max(gaps) < 0.2 + 1.0, "a heartbeat was late by more than a second"
    finally:
        linked.cancel()
        await asyncio.wait({linked})
        await server.stop(None)
