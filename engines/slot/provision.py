"""A replica's weights on its node's disk: there before its process starts, in use until its life is over."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from engines.weights import stager, store
from scheduler.contracts import clock, fleet


class Provision:
    """What one replica has on the disk.

    Args:
        what: its spec, as the broker gave it.
        provider: the node's weights.
        time: the clock.
        told: called with a line while they are on their way.

    Attributes:
        staging: whether they are on their way now.
        took_s: seconds that it took to have them; None where they are loaded from where they lie.
    """

    def __init__(
        self,
        what: fleet.ReplicaSpec,
        provider: stager.Provider,
        time: clock.Clock,
        told: Callable[[str], None],
    ) -> None:
        self._what = what
        self._provider = provider
        self._time = time
        self._told = told
        self._use: store.Use | None = None
        self.staging = False
        self.took_s: float | None = None

    @property
    def spec(self) -> fleet.ReplicaSpec:
        """The spec with the weights where they are on this node."""
        if self._use is None:
            return self._what
        return dataclasses.replace(self._what, weights=str(self._use.folder))

    async def have(
        self,
        wanted: Callable[[], bool],
        pause: Callable[[], Awaitable[None]],
        news: Callable[[], None],
    ) -> bool:
        """Have the weights; False if they are not wanted any more.

        Args:
            wanted: whether they still are.
            pause: waits for news of any kind, or some time.
            news: called when there is some.

        Raises:
            stager.Refused: they can't be had as they are.
        """
        if self._use is not None:
            return True
        began = self._time.monotonic()
        getting = asyncio.ensure_future(self._provider.get(self._what, self._tell))
        getting.add_done_callback(lambda _: news())
        try:
            while not getting.done() and wanted():
                await pause()
            if not getting.done():
                return False
            self._use = getting.result()
        finally:
            getting.cancel()
            await asyncio.wait({getting})
            self.staging = False
        if self._use is not None:
            self.took_s = round(self._time.monotonic() - began, 3)
        return True

    def _tell(self, line: str) -> None:
        self.staging = True
        self._told(line)

    def close(self) -> None:
        """Hold them no longer."""
        if self._use is not None:
            self._use.close()
            self._use = None
