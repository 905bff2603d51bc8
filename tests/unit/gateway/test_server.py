"""Starting and ending a gateway process."""

import socket

import httpx
import pytest

from tests.unit.gateway import harness


async def test_taken_ports_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"\[gateway\] http_port {port} on 127.0.0.1: Address"):
            async with harness.gateway(None, http_port=port):
                pytest.fail("the port is taken")
        with pytest.raises(OSError, match=rf"\[gateway\] grpc_port {port}: "):
            async with harness.gateway(None, grpc_port=port):
                pytest.fail("the port is taken")


async def test_openapi_describes_our_fields_and_needs_no_key() -> None:
    async with (
        harness.gateway(harness.make_view([])) as served,
        httpx.AsyncClient(base_url=served.http, trust_env=False) as session,
    ):
        described = (await session.get("/openapi.json")).json()
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            assert "forebay_priority" in described["paths"][path]["post"]["description"]
        assert {"/v1/models", "/health", "/metrics"} <= set(described["paths"])


async def test_a_part_that_fails_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that no longer keeps time must not go on as if nothing had happened."""

    def broken() -> None:
        raise RuntimeError("the waiting room fell down")

    async def serve() -> None:
        async with harness.gateway(harness.make_view([])) as served:
            monkeypatch.setattr("gateway.local_room.LocalRoom.tick", lambda self: broken())
            await served.task

    with pytest.raises(RuntimeError, match="fell down"):
        await serve()
