"""A uvicorn server that ends at once: uvicorn's own waits tenths of a second in four places."""

import asyncio
import contextlib
import socket

import uvicorn

_TICK_S = 1.0  # the date in answers' heads is that of the last tick
_LOOK_S = 0.005  # between two looks at whether the last answers are out


class CannotListen(OSError):
    """A port is taken or not allowed; the message names the setting."""


class Server(uvicorn.Server):
    """Serves until `stop`, which is seen at once, and is over when the last byte is out.

    Args:
        config: uvicorn's; running answers get its `timeout_graceful_shutdown` seconds.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Take no new connections; running answers may end."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Serve; uvicorn counts ticks of a tenth of a second and does something at each tenth one."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 10
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does, but for its waits."""
        for server in self.servers:
            server.close()
        for bound in sockets or []:
            bound.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - it rings no bell
                    await asyncio.sleep(_LOOK_S)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()
