"""What a journal says up to some byte, kept beside it, so that a long one need not be read again whole.

A checkpoint is a shortcut and never the truth: one that is damaged, of another version or not of this journal
is not there. It names the bytes that it covers and the checksum of the last of them.
"""

import logging
import os
import zlib
from array import array
from pathlib import Path
from typing import BinaryIO

import msgspec

from batch_jobs import partial

_LOG = logging.getLogger(__name__)
NAME = "checkpoint"
_MAGIC = b"forebay-checkpoint-1\n"
_TAIL = 4096  # bytes of the journal before its end that are compared


class Unfinished(msgspec.Struct, array_like=True):
    """A line that was sent and has no result."""

    line: int
    attempts: int
    failures: int
    lost: int
    preempted: int


class Begun(msgspec.Struct, array_like=True):
    """The beginning of a line's answer."""

    line: int
    version: str
    prompt: bytes
    cached: int
    tokens: bytes
    ahead: bytes

    @classmethod
    def of(cls, line: int, found: partial.Partial) -> "Begun":
        """Return what is kept of it."""
        return cls(line, found.version, found.prompt, found.cached, found.tokens, found.ahead)

    def partial(self) -> partial.Partial:
        """Return it as it was."""
        return partial.Partial(self.version, self.prompt, self.cached, self.tokens, self.ahead)


class Checkpoint(msgspec.Struct, array_like=True):
    """A journal's state after its first `size` bytes.

    Attributes:
        states: one byte a line, by number.
        marks: where in the input file every `MARK_LINES`th line begins, as far as it was read.
    """

    size: int
    tail: int
    states: bytes
    sealed: str
    ok: int
    failed: int
    preempted: int
    retried: int
    unfinished: list[Unfinished]
    begun: list[Begun]
    marks: list[int]
    used: list[int]
    pending: list[tuple[int, tuple[int, ...]]]
    answered: list[tuple[int, int]] = []


MARK_LINES = 4096


def tail(journal: BinaryIO, size: int) -> int:
    """Return the checksum of the bytes before ``size``."""
    at = max(0, size - _TAIL)
    journal.seek(at)
    return zlib.crc32(journal.read(size - at))


def write(folder: Path, found: Checkpoint) -> None:
    """Write a checkpoint by atomic rename; it need not survive a power loss, so it is not synced.

    A disk that refuses costs time at the next start and nothing else.
    """
    part = folder / f".{NAME}.part"
    try:
        with (folder / "journal").open("rb") as journal:
            found.tail = tail(journal, found.size)
        data = msgspec.msgpack.encode(found)
        part.write_bytes(_MAGIC + zlib.crc32(data).to_bytes(4, "big") + data)
        part.replace(folder / NAME)
    except OSError as error:
        _LOG.warning("%s: no checkpoint is kept: %s", folder, error)
        part.unlink(missing_ok=True)


def read(folder: Path, last_line: int) -> Checkpoint | None:
    """Return the checkpoint of the journal in ``folder`` if there is a good one."""
    try:
        raw = (folder / NAME).read_bytes()
        data = raw[len(_MAGIC) + 4 :]
        check = zlib.crc32(data).to_bytes(4, "big")
        if not raw.startswith(_MAGIC) or raw[len(_MAGIC) : len(_MAGIC) + 4] != check:
            return None
        found = msgspec.msgpack.decode(data, type=Checkpoint)
        with (folder / "journal").open("rb") as journal:
            whole = os.fstat(journal.fileno()).st_size >= found.size
            same = whole and tail(journal, found.size) == found.tail
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _LOG.warning("%s: its checkpoint is of no use: %s", folder, error)
        return None
    return found if same and len(found.states) == last_line + 1 else None


def marks(found: Checkpoint | None) -> "array[int]":
    """Return where the input file's lines begin, as far as that is known."""
    return array("Q", found.marks if found is not None else [0])
