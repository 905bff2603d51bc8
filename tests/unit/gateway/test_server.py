"""Starting and ending a gateway process."""

import contextlib
import socket
from typing import Any

import httpx
import pytest

from gateway import dependencies, server, settings
from gateway.admission import rooms
from tests.unit.gateway import fleets, harness


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
        harness.gateway(fleets.make_view([])) as served,
        httpx.AsyncClient(base_url=served.http, trust_env=False, verify=False) as session,
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
        async with harness.gateway(fleets.make_view([])) as served:
            monkeypatch.setattr("gateway.local_room.LocalRoom.tick", lambda self: broken())
            await served.task

    with pytest.raises(RuntimeError, match="fell down"):
        await serve()


async def test_one_of_several_workers_listens_once_it_knows_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was started anew listened at once, and told its clients that it had not heard of the fleet."""
    seen: list[str] = []
    listen = server._listen

    async def first_view(deps: dependencies.Dependencies) -> None:
        seen.append("view")

    def listening(table: settings.GatewaySettings) -> contextlib.AbstractContextManager[Any]:
        seen.append("listen")
        return listen(table)

    monkeypatch.setattr(rooms, "first_view", first_view)
    monkeypatch.setattr(server, "_listen", listening)
    async with harness.gateway(fleets.make_view([]), workers=2):
        assert seen == ["view", "listen"]
