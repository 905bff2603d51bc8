"""Calls that may hang, on threads that do not keep an event loop from its end.

`asyncio.run` waits without a limit for the threads of `asyncio.to_thread`, and the interpreter for those of
any executor; a database whose host has stopped answers nobody for as long as it likes.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

MOST = (
    32  # more than a process has calls under way; those that hang must not take the place of others
)
_Answer = TypeVar("_Answer")


class Threads(futures.ThreadPoolExecutor):
    """For a loop's `set_default_executor`: its end waits for nobody, the interpreter's still would."""

    def __init__(self) -> None:
        super().__init__(MOST, "apart")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let threads end as they become free, and begin nothing more, whatever is asked for."""
        del wait, cancel_futures
        super().shutdown(wait=False, cancel_futures=True)


def call(work: Callable[[], _Answer]) -> "futures.Future[_Answer]":
    """Make a call on a thread of its own, which does not keep the process from its end either."""
    said: futures.Future[_Answer] = futures.Future()

    def run() -> None:
        if not said.set_running_or_notify_cancel():
            return
        try:
            said.set_result(work())
        except BaseException as error:
            said.set_exception(error)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return said
