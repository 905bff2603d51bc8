"""The ranks of a simulated replica over several nodes: they meet, and compute nothing.

As vLLM's: rank 0 serves once all are there, and does not see by itself that one has gone.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

from engines.replica import launch

_AGAIN_S = 0.05  # rank 0 may not listen yet
_PATIENCE_S = 300.0  # as torch's store waits for its peers


@contextlib.asynccontextmanager
async def gathered(rank: launch.Rank) -> AsyncIterator[None]:
    """Be rank 0: entered once every other rank is there."""
    host, port = rank.place
    arrived = asyncio.Semaphore(0)
    streams: list[asyncio.StreamWriter] = []

    def arrive(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams.append(writer)
        arrived.release()

    door = await asyncio.start_server(arrive, host, port)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            for _ in range(rank.nodes - 1):
                await arrived.acquire()
        yield
    finally:
        door.close()
        for stream in streams:
            stream.close()


def follow(rank: launch.Rank, reporter: launch.Reporter) -> None:
    """Be a rank past the first; returns only by an error.

    Raises:
        OSError: rank 0 is not there.
        RuntimeError: it has gone.
    """
    began = time.monotonic()
    while True:
        try:
            link = socket.create_connection(rank.place, timeout=_PATIENCE_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() - began > _PATIENCE_S:
                raise
            time.sleep(_AGAIN_S)
    with link:
        link.settimeout(None)
        reporter.phase("join", round(time.monotonic() - began, 3))
        link.recv(1)
    raise RuntimeError("rank 0 has gone")
