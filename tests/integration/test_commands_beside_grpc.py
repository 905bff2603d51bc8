"""Short commands beside live gRPC channels: many of them, and real seconds."""

import asyncio
import time

import grpc
import pytest

from slurm_plugins import children


async def _echo(request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
    return request


def _server() -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"E": handler}),))
    return server, server.add_insecure_port("127.0.0.1:0")


@pytest.mark.alone
@pytest.mark.timeout(240)
async def test_e7_two_thousand_commands_beside_live_grpc_channels() -> None:
    server, port = _server()
    await server.start()
    gaps: list[float] = []
    done = asyncio.Event()
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/t.T/E")

        async def heart() -> None:
            last = time.monotonic()
            while not done.is_set():
                assert await call(b"x", timeout=5) == b"x"
                await asyncio.sleep(0.05)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        beating = asyncio.create_task(heart())
        for _ in range(200):
            ended = await asyncio.gather(
                *(children.run(["/bin/true"], timeout_s=30) for _ in range(10))
            )
            assert [one.code for one in ended] == [0] * 10
        done.set()
        await beating
    await server.stop(None)
    assert max(gaps) < 1.05
