"""Appends to a job's journal, synced in groups; holds its lock, so that two runners never work on one job.

The death of a runner frees the lock at once. What an entry means is `journal`'s business.
"""

import fcntl
import logging
import os
import threading
from pathlib import Path

from batch_jobs import checkpoint, journal

_LOG = logging.getLogger(__name__)
_CHECKPOINT_BYTES = 32 << 20  # read again in less than a second


class JournalBusy(Exception):
    """Another process writes this journal."""


class Writer:
    """Appends entries; `commit` makes all that were appended before it durable.

    `append` may be called while `commit` runs in another thread. After a failed commit (a full disk)
    nothing is lost: the file is cut back to its last whole entry and the next commit writes again.
    """

    def __init__(self, path: Path, last_line: int = 0) -> None:
        """Open and lock the journal, recover it, and cut what is torn at its end.

        Args:
            path: the journal; made if it is not there.
            last_line: the number of the job's last line.

        Raises:
            JournalBusy: another process holds it.
            JournalError: not a journal.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalBusy(f"{path} is held by another runner") from None
            self.recovered = journal.recover(path, last_line)
            self._size = self.recovered.size
            if cut := os.fstat(self._fd).st_size - self._size:
                _LOG.warning("%s: %d bytes after its last whole entry are cut", path, cut)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        self._folder = path.parent
        self._kept = self._size  # bytes that a checkpoint covers, or that were just read
        self._buffer: list[bytes] = [] if self._size else [journal.MAGIC]
        self._lock = threading.Lock()  # guards the buffer
        self._committing = threading.Lock()

    def append(self, entry: journal.Entry) -> None:
        """Queue an entry for the next commit."""
        with self._lock:
            self._buffer.append(entry.encode())

    def commit(self) -> None:
        """Write what is queued and return when it is on disk.

        Raises:
            OSError: the disk refused; what was queued stays queued.
        """
        with self._committing:
            self._flush()

    def due(self) -> checkpoint.Checkpoint | None:
        """Return a checkpoint if one is due: call where `append` is called, `keep` it after a commit."""
        with self._lock:
            size = self._size + sum(map(len, self._buffer))
        if size - self._kept < _CHECKPOINT_BYTES:
            return None
        self._kept = size
        return self.recovered.kept(size)

    def keep(self, found: checkpoint.Checkpoint) -> None:
        """Write a checkpoint; everything up to its size has been committed."""
        checkpoint.write(self._folder, found)

    def _flush(self) -> None:
        with self._lock:
            queued = len(self._buffer)
            data = b"".join(self._buffer[:queued])
        if not data:
            return
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._size + done)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        with self._lock:
            self._size += len(data)
            del self._buffer[:queued]

    def close(self) -> None:
        """Commit and let go of the file, once; the lock is free even if the commit failed."""
        with self._committing:
            if self._fd < 0:
                return
            try:
                self._flush()
            finally:
                os.close(self._fd)
                self._fd = -1
