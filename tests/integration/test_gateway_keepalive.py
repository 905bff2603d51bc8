"""gRPC clients that ping while their call waits in silence (case G13), scaled down from 10 s pings.

gRPC sends at most one ping a second, and its server cuts a client at the third that comes too early.
"""

import asyncio
from typing import Any

import grpc
import pytest

from gateway import settings
from scheduler.contracts import fleet
from scheduler.contracts.v1 import forebay_pb2, forebay_pb2_grpc
from tests.unit.gateway import harness

PING_MS, WAIT_MS = 1_000, 6_000


async def queued_call(min_ping_s: float) -> grpc.aio.AioRpcError:
    """Let a call wait in the queue until its deadline, with a client that pings; return its error."""
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    starting = {"state": fleet.ReplicaState.STARTING}
    async with (
        harness.one_replica(harness.hello, replica=starting, keepalive_min_ping_s=min_ping_s) as (
            served,
            _,
        ),
        grpc.aio.insecure_channel(served.grpc, options=options) as channel,
    ):
        api: Any = forebay_pb2_grpc.InferenceStub(channel)
        asked = forebay_pb2.GenerateRequest(
            model="chat", prompt="a", max_tokens=1, deadline_ms=WAIT_MS
        )
        call = api.Generate(asked, metadata=(("authorization", "Bearer ann"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value


async def test_a_call_that_waits_survives_its_clients_pings_g13() -> None:
    """With our options it does; with gRPC's own default of five minutes the same call is cut."""
    assert settings.GatewaySettings().keepalive_min_ping_s < 10  # what clients commonly ping by
    ours, default = await asyncio.gather(queued_call(PING_MS / 2_000), queued_call(300))
    assert ours.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # the gateway's word, after the wait
    assert default.code() is grpc.StatusCode.UNAVAILABLE
    assert default.details() == "Too many pings"
