"""Takes a submitted file in, chunk by chunk: keeps it, checks each line, notes the bad ones.

Everything lies in one folder of the state folder (`FOLDER`/<job id>/): the file as it came, and the
lines that can't be sent, which the runner takes into the job's journal when it opens it.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from batch_jobs import estimates, lines, results

FOLDER = "batch"
REJECTS = "rejects.jsonl"
_INCOMING = "incoming-"
_STALE_S = 86_400
_SHOWN = 100


def job_folder(state_dir: Path, job_id: int) -> Path:
    """Return the folder of a job's files."""
    return state_dir / FOLDER / str(job_id)


def stored_bytes(folder: Path) -> int:
    """Return what a job's files take."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What validation found.

    Attributes:
        total: requests in the file, bad ones included.
        bad: of these, lines that can't be sent.
        last_line: number of the last line, blank ones included.
        sha256: of the whole file, in hex.
        shown: the first bad lines, at most 100.
        bytes: of the whole file.
        tokens: what the good lines are estimated to take.
    """

    total: int
    bad: int
    last_line: int
    sha256: str
    shown: tuple[lines.BadLine, ...]
    bytes: int = 0
    tokens: estimates.Tokens = dataclasses.field(default_factory=estimates.Tokens)

    def public(self) -> dict[str, Any]:
        """Return the report as the API shows it."""
        return {
            "lines": self.total,
            "bad_lines": self.bad,
            "errors": [dataclasses.asdict(bad) for bad in self.shown],
        }


class Intake:
    """One upload. Calls block: an event loop runs them in a thread, one at a time."""

    def __init__(self, state_dir: Path, rules: lines.Rules, max_line_bytes: int) -> None:
        parent = state_dir / FOLDER
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder: Path | None = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=parent))
        self._state_dir = state_dir
        self._rules = rules
        self._splitter = lines.Splitter(max_line_bytes)
        self._seen = lines.Seen()
        self._sha256 = hashlib.sha256()
        self._file = _create(self.folder / results.INPUT)
        self._rejects = _create(self.folder / REJECTS)
        self._tokens = estimates.Tokens()
        self._bytes = 0
        self._total = 0
        self._bad = 0
        self._shown: list[lines.BadLine] = []

    @property
    def total(self) -> int:
        """Requests so far."""
        return self._total

    def feed(self, chunk: bytes) -> None:
        """Take the file's next bytes."""
        self._bytes += len(chunk)
        self._file.write(chunk)
        self._sha256.update(chunk)
        self._check(self._splitter.feed(chunk))

    def finish(self) -> Report:
        """Take the end of the file; its parts are on disk when this returns."""
        self._check(self._splitter.close())
        for file in (self._file, self._rejects):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return Report(
            total=self._total,
            bad=self._bad,
            last_line=self._splitter.number,
            sha256=self._sha256.hexdigest(),
            shown=tuple(self._shown),
            bytes=self._bytes,
            tokens=self._tokens,
        )

    def place(self, job_id: int) -> None:
        """Move the files to where the job's runner looks for them."""
        if self.folder is None:
            raise RuntimeError("these files were placed or thrown away already")
        target = job_folder(self._state_dir, job_id)
        if target.exists():  # left by an insert that was undone: no job has this id
            shutil.rmtree(target)
        results.sync_folder(self.folder)
        self.folder.rename(target)
        results.sync_folder(target.parent)
        self.folder = None

    def discard(self) -> None:
        """Throw the files away, unless they were placed."""
        self._file.close()
        self._rejects.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)
            self.folder = None

    def _check(self, raws: Iterable[lines.RawLine]) -> None:
        for raw in raws:
            line = lines.check(raw, self._rules, self._seen)
            if line is None:
                continue
            self._total += 1
            if isinstance(line, lines.Line):
                self._tokens.add(line, len(raw.data))
            else:
                self._bad += 1
                self._rejects.write(json.dumps(dataclasses.asdict(line)).encode() + b"\n")
                if len(self._shown) < _SHOWN:
                    self._shown.append(line)


def _create(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def rejects(folder: Path) -> Iterator[lines.BadLine]:
    """Yield the lines that intake refused."""
    with (folder / REJECTS).open("rb") as file:
        for text in file:
            yield lines.BadLine(**json.loads(text))


def sweep(state_dir: Path) -> None:
    """Remove uploads that were broken off a day ago or more."""
    for folder in (state_dir / FOLDER).glob(f"{_INCOMING}*"):
        if time.time() - folder.stat().st_mtime > _STALE_S:
            shutil.rmtree(folder, ignore_errors=True)
