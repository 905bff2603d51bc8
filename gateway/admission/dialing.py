"""How a worker reaches an owner of queues: by its socket file, or on another host."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from gateway.admission import link

Dial = Callable[[Callable[[], link.AnyLink]], Awaitable[None]]


def unix(path: str) -> Dial:
    """Return how to reach an owner by its socket file."""

    async def dial(protocol: Callable[[], link.AnyLink]) -> None:
        await asyncio.get_running_loop().create_unix_connection(protocol, path)

    return dial


def tcp(address: str, timeout_s: float) -> Dial:
    """Return how to reach an owner on another host."""
    host, _, port = address.rpartition(":")

    async def dial(protocol: Callable[[], link.AnyLink]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(
                    protocol, host.strip("[]"), int(port)
                )
                return
        raise OSError(f"{address}: no connection within {timeout_s:g} s")

    return dial
