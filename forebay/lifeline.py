"""How a process lives: with its parent, with enough open files, and until it is told to end."""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Coroutine
from typing import Any

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies; leave at once if it already has.

    Called by the child itself at its start: no code runs between fork and exec in the parent, which
    may hold gRPC threads.

    Args:
        parent: the parent's pid as the parent gave it.

    Raises:
        SystemExit: the parent was gone before the tie was made.
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:
        raise SystemExit(0)


def open_files() -> None:
    """Allow this process as many open files as the site's hard limit does.

    The usual soft limit of 1024 is for programs that use select(2), which we don't: a gateway holds two
    connections for each stream, and must not stop to accept at 500.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # "unlimited" is more than some kernels give
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def until_term(body: Coroutine[Any, Any, None]) -> None:
    """Run ``body`` until it ends or SIGTERM or SIGINT cancels it."""
    task = asyncio.ensure_future(body)
    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
