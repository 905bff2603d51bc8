"""How long a gRPC call may take to end once nothing but its client holds it up.

The end of a call stands behind what was written before it. A client that reads nothing never gets there, and
grpc.aio offers no way to drop such a call: its place, one of `grpc_calls`, would be taken until the client
leaves. But one task of each call waits for its close and holds the place, while the handler runs in another.
To cancel both lets the call go.
"""

import asyncio
import gc
import logging
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)


def within(seconds: float) -> None:
    """Let the call of the current task go unless it is over after ``seconds``."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a gRPC call outside a task")
    late = asyncio.get_running_loop().call_later(seconds, _let_go, task)
    task.add_done_callback(lambda _: late.cancel())


def _let_go(handler: "asyncio.Task[Any]") -> None:
    keeper = _keeper(handler)
    if keeper is None:
        _log.warning(
            "a gRPC call that its client does not read keeps its place: grpc.aio's tasks are unknown"
        )
    else:
        keeper.cancel()
    handler.cancel()


def _keeper(handler: "asyncio.Task[Any]") -> "asyncio.Task[Any] | None":
    """Return the task that waits for the close of the call that ``handler`` answers: it alone names it."""
    for task in asyncio.all_tasks():
        if task is not handler:
            for coroutine in _awaited(task.get_coro()):
                for scope in gc.get_referents(coroutine):
                    if any(held is handler for held in gc.get_referents(scope)):
                        return task
    return None


def _awaited(coroutine: Any) -> Iterator[Any]:
    """Yield a coroutine of Cython's and what it awaits, outermost first; nothing for any other."""
    while type(coroutine).__module__.startswith("_cython_"):
        yield coroutine
        coroutine = coroutine.cr_await
