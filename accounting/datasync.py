"""fdatasync on the event loop, without a thread: Linux's asynchronous I/O and an eventfd.

A thread costs two switches and two turns of the interpreter's lock for each sync, more than all the rest of
a request's record. Where the kernel, the file system or a container's filter does not offer this, `open_`
returns None or a sync says so, and the caller takes a thread. Standard library only.
"""

import asyncio
import contextlib
import ctypes
import os
import platform
from collections.abc import Callable

# x86-64's and arm64's numbers of io_setup, io_destroy, io_submit, io_getevents (asm/unistd.h).
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_FDSYNC = 3  # IOCB_CMD_FDSYNC
_RESFD = 1  # IOCB_FLAG_RESFD

Landed = Callable[[int], None]


class _Order(ctypes.Structure):
    """struct iocb of linux/aio_abi.h, little-endian."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    )


class _Done(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("more", ctypes.c_int64),
    )


class DataSync:
    """One fdatasync at a time; made by `open_`."""

    def __init__(self, context: int, bell: int) -> None:
        self._calls = _CALLS[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(context)
        self._bell = bell
        self._order = _Order(opcode=_FDSYNC, flags=_RESFD, resfd=bell)
        self._orders = (ctypes.c_void_p * 1)(ctypes.addressof(self._order))
        self._done = (_Done * 1)()
        self._patience = (ctypes.c_int64 * 2)(0, 5_000_000)  # struct timespec
        self._loop: asyncio.AbstractEventLoop | None = None
        self._landed: Landed | None = None

    @property
    def flying(self) -> bool:
        """Whether a sync is under way."""
        return self._landed is not None

    def begin(self, fd: int, landed: Landed) -> bool:
        """Begin to sync ``fd``; False if that is not offered here: take a thread.

        Args:
            fd: the file.
            landed: called once, on the running loop or by `land`, with 0 or an errno.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            loop.add_reader(self._bell, self._ring)
            self._loop = loop
        self._order.fd = fd
        self._landed = landed
        one = ctypes.c_long(1)
        number = ctypes.c_long(self._calls[2])
        if self._call(number, self._context, one, ctypes.byref(self._orders)) != 1:
            self._landed = None
            return False
        return True

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._collect(0)

    def land(self) -> None:
        """Wait for the sync under way, if there is one: for who closes, and runs no loop."""
        while self._landed is not None:  # the loop of another thread may be the one who hears it
            self._collect(1)

    def _collect(self, least: int) -> None:
        number, room = ctypes.c_long(self._calls[3]), ctypes.c_long(1)
        found = self._call(
            number,
            self._context,
            ctypes.c_long(least),
            room,
            ctypes.byref(self._done),
            ctypes.byref(self._patience),
        )
        landed = self._landed
        if found == 1 and landed is not None:
            self._landed = None
            landed(-min(0, self._done[0].result))

    def close(self) -> None:
        """Give the kernel's part back; nothing may be under way."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError, OSError):
                self._loop.remove_reader(self._bell)
        self._call(ctypes.c_long(self._calls[1]), self._context)
        os.close(self._bell)


def open_() -> DataSync | None:
    """Return a `DataSync`, None where the kernel offers none."""
    calls = _CALLS.get(platform.machine())
    if calls is None or not hasattr(os, "eventfd"):
        return None
    context = ctypes.c_ulong(0)
    setup = ctypes.CDLL(None, use_errno=True).syscall
    if setup(ctypes.c_long(calls[0]), ctypes.c_long(1), ctypes.byref(context)) != 0:
        return None
    return DataSync(context.value, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
