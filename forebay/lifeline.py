"""Ties a process to the one that started it: when the parent dies, however it dies, so do we."""

import ctypes
import os
import signal

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
