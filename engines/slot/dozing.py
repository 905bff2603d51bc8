"""One sleep of a replica whose process stays (rung 2 on GPUs), as its keeper sees it.

Whatever goes wrong is a reason, not an error: the keeper ends the process then, which parks it too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from engines.slot import children, control, wanted


class Nap:
    """From sleep to wake.

    Args:
        remote: the replica.
        ended: is done once its process has ended.
        wish: returns what is wanted of it now.
        ring: waits for news, or for so many seconds.
        bell: makes `ring` return.
    """

    def __init__(
        self,
        remote: control.Control,
        ended: "asyncio.Task[children.Exit]",
        wish: Callable[[], wanted.Wish],
        ring: Callable[[float], Awaitable[None]],
        bell: Callable[[], None],
    ) -> None:
        self._remote = remote
        self._ended = ended
        self._wish = wish
        self._ring = ring
        self._bell = bell
        self.line = ""

    async def sleep(self, limit_s: float) -> str:
        """Have it sleep; returns why it does not, or ""."""
        said = await self._asked(self._remote.sleep(limit_s), limit_s)
        if not said["failed"]:
            freed = f"{said['freed_bytes'] / 1e9:.1f} GB of GPU memory freed"
            self.line = f"parked: asleep at level {said['level']}, {freed}"
        return str(said["failed"])

    async def until_wanted(self, pause_s: float) -> bool:
        """Return once it is to wake (true), or is to stop or has ended."""
        while self._wish().run and not self._wish().up and not self._ended.done():
            await self._ring(pause_s)
        return self._wish().up and not self._ended.done()

    async def wake(self, incarnation: int, limit_s: float) -> str:
        """Have it serve again; returns why it does not, or ""."""
        role = self._wish().role.value
        said = await self._asked(self._remote.wake(role, incarnation, limit_s), limit_s)
        return str(said["failed"])

    async def _asked(
        self, call: Coroutine[Any, Any, Mapping[str, Any]], limit_s: float
    ) -> Mapping[str, Any]:
        """Wait for the answer, unless the process ends or is to stop meanwhile."""
        asking = asyncio.create_task(call)
        asking.add_done_callback(lambda _: self._bell())
        try:
            while not asking.done() and self._wish().run and not self._ended.done():
                await self._ring(limit_s)
            if asking.done():
                return asking.result()
            return {"failed": "it ended or was to stop meanwhile"}
        except control.ControlError as error:
            return {"failed": str(error)}
        finally:
            asking.cancel()
            await asyncio.wait({asking})
