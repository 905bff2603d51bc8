"""One segment of the spool while its process writes it: space taken ahead, rows, the sync, the seal.

It knows nothing of other segments and of who waits for a sync: that is `accounting.spool`. Standard
library only.
"""

import contextlib
import os
from pathlib import Path

from accounting import records, segment
from scheduler.contracts import usage


class OpenSegment:
    """A segment that this process writes; its name never returns.

    Args:
        folder: where it is made; the folder is made if it is not there.
        name: its file name.
        size: bytes that it takes on the disk at once.
        header: what it begins with.

    Raises:
        OSError: there is no room for it, or no such folder can be; nothing is left behind.
    """

    def __init__(self, folder: Path, name: str, size: int, header: bytes) -> None:
        _make(folder)
        self.path = folder / name
        self._name, self._marker = str(self.path), str(self.path.with_suffix(segment.TAKEN))
        self.size = size
        self.rows = 0
        self.unsynced: list[usage.Row] = []
        self._encoder = records.Encoder()
        self._new = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o640)
        try:
            os.posix_fallocate(self.fd, 0, size)
            self.offset = 0
            self._write(header)
        except OSError:
            os.close(self.fd)
            self.path.unlink(missing_ok=True)
            raise

    @property
    def new(self) -> bool:
        """Whether its name may not be on disk yet."""
        return self._new

    @property
    def free(self) -> int:
        """Bytes that rows may still take."""
        return self.size - self.offset - segment.SEAL_BYTES

    def append(self, row: usage.Row) -> bool:
        """Write a row; False if there is no room for it, and then no other may be written here.

        Raises:
            errors.Internal: it holds a number that no reader would take; nothing is changed.
            OSError: the disk refused it.
        """
        record = self._encoder.encode(row)
        if len(record) > self.size - self.offset - segment.SEAL_BYTES:
            return False
        self._write(record)
        self.rows += 1
        self.unsynced.append(row)
        return True

    def _write(self, data: bytes) -> None:
        written = os.pwrite(self.fd, data, self.offset)
        self.offset += written
        if written < len(data):
            self._write(data[written:])

    def sync(self) -> None:
        """Put what was written on the disk; blocks."""
        os.fdatasync(self.fd)
        if self._new:
            _sync_folder(self.path.parent)
            self._new = False

    def taken(self) -> bool:
        """Whether the shipper has taken it; the order matters, see `accounting.ship`."""
        return os.path.exists(self._marker) or not os.path.exists(self._name)  # noqa: PTH110 - for each sync

    def seal(self) -> None:
        """End it, give the rest of its space back, and close it; blocks."""
        self._write(segment.encode_seal(self.rows))
        os.ftruncate(self.fd, self.offset)
        self.sync()
        self.close()

    def discard(self) -> None:
        """Remove a segment that never held a row."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give the file back as it is."""
        os.close(self.fd)


def _make(folder: Path) -> None:
    """Make a folder, so that it is still there after a power cut."""
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o750)  # whatever the umask: who used what is not everybody's business
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
