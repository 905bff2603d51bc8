"""The log of what people decided about money: rates, adjustments, closed months. Append-only.

One file for each posting, ``postings/00000001.json`` and on, under the state folder that every gateway
and broker of a site shares. A posting is written under a hidden name, synced, and then *linked* to the
next free number, which fails if somebody else took it: then the decision is made again over the newer
log. So several hosts may write at once, on NFS too, without a lock, and a rule such as "no rate begins
in a closed month" holds whoever was faster. Each posting holds the SHA-256 of the one before: a file
that was changed or taken away later is found by the next reading, and nothing is billed from it.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accounting import manifest

FOLDER = "postings"
_DIGITS = 8
_ATTEMPTS = 100


class PostingsDamaged(Exception):
    """A posting is missing or was changed: restore the folder from a backup."""


@dataclasses.dataclass(frozen=True, slots=True)
class Posting:
    """One decision.

    Attributes:
        number: its place in the log, from 1.
        kind: what `body` holds: rate, adjustment or close.
        at_us: when it was made, UTC µs.
        author: who made it.
        reason: why, in one line.
        before: SHA-256 of the posting before it, "" for the first.
    """

    number: int
    kind: str
    at_us: int
    author: str
    reason: str
    body: Mapping[str, Any]
    before: str


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A posting that has no place yet."""

    kind: str
    at_us: int
    author: str
    reason: str
    body: Mapping[str, Any]


Log = tuple[Posting, ...]


class Postings:
    """Reads and appends one folder's log. Every method blocks; threads may share one object."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / FOLDER
        self._lock = threading.Lock()
        self._known: Log = ()
        self._digest = ""

    def read(self) -> Log:
        """Return the whole log.

        Raises:
            PostingsDamaged: it is not as it was written.
        """
        with self._lock:
            while (data := self._file(len(self._known) + 1)) is not None:
                self._known = (*self._known, self._parsed(data))
                self._digest = hashlib.sha256(data).hexdigest()
            return self._known

    def append(self, decide: Callable[[Log], Draft]) -> Posting:
        """Append what ``decide`` makes of the log as it is when the posting gets its place.

        Args:
            decide: pure; it is called again over a longer log when another writer was faster. What
                it raises ends the attempt, and nothing is written.

        Raises:
            PostingsDamaged: the log is not as it was written.
            OSError: the folder can't be written.
        """
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            log = self.read()
            with self._lock:
                before = self._digest if len(self._known) == len(log) else None
            if before is None:
                continue  # another thread has read on
            draft = decide(log)
            posting = Posting(number=len(log) + 1, before=before, **_fields(draft))
            if self._put(posting):
                return posting
        raise OSError(f"{self.folder}: other writers were faster {_ATTEMPTS} times: try again")

    def _put(self, posting: Posting) -> bool:
        """Give the posting its number, unless somebody has it already."""
        data = json.dumps(dataclasses.asdict(posting), sort_keys=True, indent=1).encode()
        hidden = self.folder / f".{secrets.token_hex(8)}.new"
        manifest.write_durably(hidden, data)
        try:
            os.link(hidden, self._path(posting.number))
        except FileExistsError:
            # NFS may repeat a link that has worked, and then says that it exists: two names tell.
            if hidden.stat().st_nlink < 2:
                return False
        finally:
            hidden.unlink(missing_ok=True)
        manifest.sync_folder(self.folder)
        return True

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:0{_DIGITS}}.json"

    def _file(self, number: int) -> bytes | None:
        try:
            return self._path(number).read_bytes()
        except FileNotFoundError:
            self._no_gap(number)
            return None

    def _no_gap(self, number: int) -> None:
        later = [path.name for path in self.folder.glob("[0-9]*.json")]
        if any(name > f"{number:0{_DIGITS}}.json" for name in later):
            if self._path(number).exists():
                return  # it came between the two looks
            raise PostingsDamaged(
                f"{self._path(number)} is missing although later postings are there: "
                "restore it from a backup"
            )

    def _parsed(self, data: bytes) -> Posting:
        path = self._path(len(self._known) + 1)
        try:
            posting = Posting(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise PostingsDamaged(
                f"{path} can't be read ({error}): restore it from a backup"
            ) from error
        if posting.number != len(self._known) + 1 or posting.before != self._digest:
            raise PostingsDamaged(
                f"{path} does not follow the posting before it: one of them was changed; "
                "restore both from a backup"
            )
        return posting


def _fields(draft: Draft) -> dict[str, Any]:
    return {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
