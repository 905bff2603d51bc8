"""What compacted files say of themselves, kept between bills: they don't change, so it is worked out once.

Not a number of any row is kept, only what is needed before rows are read: the Parquet metadata, whose rows
are where, and a bound on what they hold. Who asks names a file by the SHA-256 that its content was verified
against, so that a file which was damaged or restored meanwhile is another one.
"""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from accounting import owner_runs

MOST_BYTES = 64 * 1024 * 1024  # thirty days of some 100 million rows
_DECODED = 2  # memory that metadata takes, times what it takes in the file

Key = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Footer:
    """What is known of a file before its rows are read.

    Attributes:
        about: its Parquet metadata.
        its: for each row group which rows are whose; None if the file does not say it.
        largest: for each row group a bound on any summed number; None where there is none.
    """

    about: Any
    its: Sequence[owner_runs.Runs] | None
    largest: Sequence[int | None]

    @property
    def bytes(self) -> int:
        """How much memory it takes, about."""
        held = int(self.about.serialized_size) * _DECODED
        for each in self.its or ():
            held += each.begins.nbytes
            held += sum(codes.nbytes + words.nbytes for codes, words in each.owners.values())
        return held


class Footers:
    """The footers that were used last; many threads may ask at once.

    Args:
        most_bytes: what they may take together.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: collections.OrderedDict[Key, Footer] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Footer | None:
        """Return a footer by its file's SHA-256 and the keys by which its rows are told apart."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Key, footer: Footer) -> None:
        """Keep a footer, in the place of those that were not asked for the longest."""
        with self._lock:
            if key not in self._kept:
                self._bytes += footer.bytes
                self._kept[key] = footer
            while self._bytes > self._most_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.bytes
