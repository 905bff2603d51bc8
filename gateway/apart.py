"""Work on large bodies, in a thread of its own: no stream waits until 20 MB are parsed and judged.

One thread for all: it and the loop take turns at the interpreter's lock, and a second would only take more of
them. A body of usual size is done with at once, for less than the way to the thread costs.
"""

import asyncio
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

LARGE = 512 * 1024  # bytes that are judged in a few milliseconds, whatever they are
_Found = TypeVar("_Found")


class Apart:
    """Does work on bodies."""

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(1, "bodies")

    async def do(self, size: int, work: Callable[[], _Found]) -> _Found:
        """Return what ``work`` does, which is on ``size`` bytes; it shares nothing with the loop."""
        if size <= LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Let the thread end; what it is at is of no use any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
