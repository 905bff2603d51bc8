"""Takes a submitted file in, chunk by chunk: keeps it, checks each line, notes the bad ones.

Everything lies in one folder of the state folder (`FOLDER`/<job id>/): the file as it came, the lines that
can't be sent, which the runner takes into the job's journal when it opens it, and how many name which model.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batch_jobs import estimates, lines, results
from scheduler.contracts import stored

log = logging.getLogger(__name__)
FOLDER = "batch"
REJECTS = "rejects.jsonl"
MODELS = "models.json"
OTHERS = ""  # stands for the models of a file that names more than `_NAMED`
_NAMED = 64
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
        self._noted = _create(self.folder / MODELS)
        self._tokens = estimates.Tokens()
        self._models: collections.Counter[str] = collections.Counter()
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
        self._noted.write(json.dumps(self._models).encode())
        for file in (self._file, self._rejects, self._noted):
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
        self._noted.close()
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
                known = len(self._models) < _NAMED or line.model in self._models
                self._models[line.model if known else OTHERS] += 1
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
            yield stored.read(lines.BadLine, json.loads(text))


def sweep(state_dir: Path) -> None:
    """Remove uploads that were broken off a day ago or more, by gateways that were killed over them."""
    for folder in (state_dir / FOLDER).glob(f"{_INCOMING}*"):
        with contextlib.suppress(
            FileNotFoundError
        ):  # its gateway has just placed it or thrown it away
            newest = max(each.stat().st_mtime for each in (folder, *folder.iterdir()))
            if time.time() - newest > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


def models(folder: Path) -> Mapping[str, int] | None:
    """Return how many good lines name which model (`OTHERS`: further ones); None: that is not known."""
    path = folder / MODELS
    try:
        return _counts(json.loads(path.read_bytes()))
    except OSError:  # a job of an older release, or its files are gone
        return None
    except (ValueError, RecursionError) as error:  # it is a hint alone
        _say_damaged(path, str(error))
        return None


def _counts(found: Any) -> Mapping[str, int]:
    if not isinstance(found, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - bad input, as all else that is wrong here
    for name, count in found.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{name}: {count!r} is no number of lines")
    return found


@functools.lru_cache(maxsize=1_000)  # once for each: it is read again and again
def _say_damaged(path: Path, why: str) -> None:
    log.warning(
        "%s: how many lines name which model can't be read (%s), so the job's own model counts; remove it",
        path,
        why,
    )
