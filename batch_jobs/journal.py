"""A job's journal: what became of each line, appended, checksummed, synced in groups.

The append of a result is the commit point of its line: results are published from the journal alone,
so a line has either its one result in here or none. A file is `MAGIC`, then entries: payload length
and CRC-32 (`_HEAD`), then the payload: kind, attempt and line number (`_BODY`) and bytes, which for a
result are the very line of the output or error file. What writes them is `journal_writer`.
"""

import collections
import dataclasses
import enum
import logging
import struct
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batch_jobs import checkpoint, partial

_LOG = logging.getLogger(__name__)
MAGIC = b"forebay-journal-1\n"
_HEAD = struct.Struct("!II")
_BODY = struct.Struct("!BIQ")
_MAX_PAYLOAD = 1 << 30
_USED = struct.Struct("!III")


class Kind(enum.IntEnum):
    """What an entry says."""

    DISPATCHED = 1  # attempt of the line was sent
    SUCCEEDED = 2  # data: its line of the output file
    FAILED = 3  # data: its line of the error file
    PREEMPTED = 4  # it gave its seat back; never counted against the line
    RETRIED = 5  # it failed and is tried again
    LOST = 6  # it failed because its replica was lost
    SEALED = 7  # data: the ending; no result follows
    PROMPT = 8  # data: the prompt's ids of an answer that has begun; none: it begins anew
    TOKENS = 9  # data: ids of the answer so far
    USED = 10  # data: tokens of the answer that comes next as the line's result


RESULTS = frozenset({Kind.SUCCEEDED, Kind.FAILED})
_BEGUN = frozenset({Kind.PROMPT, Kind.TOKENS})
_KINDS = frozenset(Kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One entry; `line` and `attempt` are 0 where they say nothing.

    Attributes:
        attempt: of the line; of a result the number of the line's model, see `reading.Reader.number`.
    """

    kind: Kind
    line: int = 0
    attempt: int = 0
    data: bytes = b""

    @property
    def size(self) -> int:
        """How many bytes it takes in the file."""
        return _HEAD.size + _BODY.size + len(self.data)

    def encode(self) -> bytes:
        """Return the entry's bytes in the file."""
        payload = _BODY.pack(self.kind, self.attempt, self.line) + self.data
        return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def used(prompt: int, cached: int, output: int) -> bytes:
    """Return what a USED entry holds."""
    return _USED.pack(*(max(0, min(tokens, 0xFFFFFFFF)) for tokens in (prompt, cached, output)))


class JournalError(Exception):
    """The file is no journal, or one of a version that this one can't read."""


@dataclasses.dataclass(slots=True)
class History:
    """What an unfinished line went through."""

    attempts: int = 0
    failures: int = 0
    lost: int = 0
    preempted: int = 0

    @property
    def counted(self) -> int:
        """Failures that count against the cap; a preemption never does."""
        return self.failures + self.lost


@dataclasses.dataclass(slots=True)
class Recovered:
    """The state of every line, one byte each, rebuilt from a journal.

    Attributes:
        states: by line number: 0, or the `Kind` of its result.
        histories: of lines that were sent and have no result.
        partials: the beginnings of these lines' answers.
        used: tokens of the answers: prompt, cached ones among them, output.
        answered: results by the number of their line's model; 0: it was not noted.
        marks: where the input file's lines begin, see `checkpoint.Checkpoint`.
        sealed: the ending, or "" while lines may still run.
        size: bytes of whole entries; the torn rest is cut when a writer opens the file.
    """

    states: bytearray
    histories: dict[int, History] = dataclasses.field(default_factory=dict)
    partials: dict[int, partial.Partial] = dataclasses.field(default_factory=dict)
    marks: "array[int]" = dataclasses.field(default_factory=lambda: array("Q", [0]))
    used: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    pending: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    answered: "collections.Counter[int]" = dataclasses.field(default_factory=collections.Counter)
    sealed: str = ""
    ok: int = 0
    failed: int = 0
    preempted: int = 0
    retried: int = 0
    size: int = 0

    def history(self, line: int) -> History:
        """Return the history of an unfinished line, made at its first entry."""
        return self.histories.setdefault(line, History())

    def add(self, entry: Entry) -> bool:
        """Take one entry into account; return False for a result that comes second and is void."""
        if entry.kind is Kind.SEALED:
            self.sealed = self.sealed or entry.data.decode()
            return True
        if self.states[entry.line]:
            return False
        if entry.kind in RESULTS:
            self.states[entry.line] = entry.kind
            self.histories.pop(entry.line, None)
            self.partials.pop(entry.line, None)
            for at, tokens in enumerate(self.pending.pop(entry.line, ())):
                self.used[at] += tokens
            self.ok += entry.kind is Kind.SUCCEEDED
            self.failed += entry.kind is Kind.FAILED
            self.answered[entry.attempt] += 1
            return True
        if entry.kind in _BEGUN:
            self._begun(entry)
            return True
        if entry.kind is Kind.USED:
            if len(entry.data) == _USED.size:
                self.pending[entry.line] = _USED.unpack(entry.data)
            return True
        history = self.history(entry.line)
        if entry.kind is Kind.DISPATCHED:
            history.attempts = entry.attempt
        elif entry.kind is Kind.PREEMPTED:
            history.preempted += 1
            self.preempted += 1
        else:
            history.failures += entry.kind is Kind.RETRIED
            history.lost += entry.kind is Kind.LOST
            self.retried += 1
        return True

    def _begun(self, entry: Entry) -> None:
        found = self.partials.get(entry.line)
        try:
            if entry.kind is Kind.TOKENS and found is not None:
                found.take(entry.data)
            elif entry.kind is Kind.PROMPT and entry.data:
                self.partials[entry.line] = partial.Partial.of_prompt(entry.data)
            elif entry.kind is Kind.PROMPT:
                self.partials.pop(entry.line, None)
        except (
            partial.PartialError
        ) as error:  # the line begins anew: a cost, and no fault of its own
            _LOG.warning("line %d: %s", entry.line, error)
            self.partials.pop(entry.line, None)

    def kept(self, size: int) -> checkpoint.Checkpoint:
        """Return what is kept of it beside a journal of ``size`` bytes."""
        return checkpoint.Checkpoint(
            size=size,
            tail=0,
            states=bytes(self.states),
            sealed=self.sealed,
            ok=self.ok,
            failed=self.failed,
            preempted=self.preempted,
            retried=self.retried,
            unfinished=[
                checkpoint.Unfinished(line, h.attempts, h.failures, h.lost, h.preempted)
                for line, h in self.histories.items()
            ],
            begun=[checkpoint.Begun.of(line, found) for line, found in self.partials.items()],
            marks=list(self.marks),
            used=list(self.used),
            pending=list(self.pending.items()),
            answered=list(self.answered.items()),
        )

    @classmethod
    def of(cls, found: checkpoint.Checkpoint) -> "Recovered":
        """Return the state that a checkpoint keeps."""
        return cls(
            states=bytearray(found.states),
            histories={
                each.line: History(each.attempts, each.failures, each.lost, each.preempted)
                for each in found.unfinished
            },
            partials={each.line: each.partial() for each in found.begun},
            marks=checkpoint.marks(found),
            used=list(found.used),
            pending=dict(found.pending),
            answered=collections.Counter(dict(found.answered)),
            sealed=found.sealed,
            ok=found.ok,
            failed=found.failed,
            preempted=found.preempted,
            retried=found.retried,
            size=found.size,
        )


def _read(file: BinaryIO) -> Entry | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size, checksum = _HEAD.unpack(head)
    if not _BODY.size <= size <= _MAX_PAYLOAD:  # zeros after a power loss, or damage
        return None
    payload = file.read(size)
    if len(payload) < size or zlib.crc32(payload) != checksum:
        return None
    kind, attempt, line = _BODY.unpack_from(payload)
    if kind not in _KINDS:  # whole, so no damage: never cut away what another version wrote
        raise JournalError(
            f"{file.name} holds an entry of kind {kind}: run the version of Forebay that wrote it"
        )
    return Entry(Kind(kind), line, attempt, payload[_BODY.size :])


def read_at(file: BinaryIO, offset: int) -> Entry:
    """Return the entry at ``offset``.

    Raises:
        JournalError: there is no whole entry.
    """
    file.seek(offset)
    entry = _read(file)
    if entry is None:
        raise JournalError(f"{file.name} is damaged at byte {offset}")
    return entry


def entries(file: BinaryIO, after: int = 0) -> Iterator[tuple[int, Entry]]:
    """Yield each whole entry with its offset, up to the end or the first torn or damaged one.

    Args:
        file: the journal.
        after: where an entry begins; 0: the first.

    Raises:
        JournalError: the file does not begin as a journal does, or a newer version wrote it.
    """
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if MAGIC.startswith(magic):  # torn while it was made: nothing was in it yet
            return
        raise JournalError(f"{file.name} is no journal of batch_jobs")
    at = max(after, len(MAGIC))
    file.seek(at)
    while (entry := _read(file)) is not None:
        yield at, entry
        at += entry.size


def recover(path: Path, last_line: int) -> Recovered:
    """Rebuild the lines' states; memory is one byte a line, and the unfinished lines' histories.

    Args:
        path: the journal; a missing one is an empty one.
        last_line: the number of the job's last line.

    Raises:
        JournalError: not a journal, or one of a longer file.
    """
    if not path.exists():
        return Recovered(bytearray(last_line + 1))
    kept = checkpoint.read(path.parent, last_line)
    found = Recovered.of(kept) if kept is not None else Recovered(bytearray(last_line + 1))
    with path.open("rb") as file:
        if kept is None:
            found.size = len(MAGIC) if file.read(len(MAGIC)) == MAGIC else 0
            file.seek(0)
        for at, entry in entries(file, found.size):
            if entry.line > last_line:
                raise JournalError(
                    f"{path} speaks of line {entry.line}, the job ends at {last_line}"
                )
            found.add(entry)
            found.size = at + entry.size
    return found
