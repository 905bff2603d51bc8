"""The folder on a node's own disk that holds weights: published ones, begun ones, locks, compile caches.

```
locks/KEY        flock: exclusive while it is staged or evicted, shared while a replica uses it
staging/KEY/     begun; of no use to anybody but the next staging
models/KEY/      published by one rename, and never changed after
caches/KEY/      what engines compiled for it
trash/           evicted, on its way out
```

Locks belong to open files, so that a killed process gives its own back. A lock's file stays: removing one
that somebody has opened would make two locks of it.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from engines.weights import budget
from scheduler.contracts import stored, weights

ABOUT = ".forebay-weights.json"  # in a published or begun folder: whose it is


class Use:
    """Weights that are in use: they stay until `close`, or until this process ends."""

    def __init__(self, folder: Path, caches: Path, descriptor: int) -> None:
        self.folder = folder
        self.caches = caches
        self._descriptor = descriptor

    def close(self) -> None:
        """Give them back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.utime(descriptor)
            finally:  # a disk that fails must not keep them
                os.close(descriptor)


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """Whose weights a folder holds."""

    uri: str
    digest: str
    size: int

    def text(self) -> str:
        """Return it as its file's text."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


def default_root() -> Path:
    """Return where weights are kept if the site says nothing."""
    return Path(tempfile.gettempdir()) / f"forebay-weights-{os.geteuid()}"


class Store:
    """The folder.

    Args:
        root: where it is; made if it is not there.

    Raises:
        OSError: it can't be made, or belongs to another user.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.geteuid():
            raise PermissionError(f"{root}: another user has made it; set [engines] weights_dir")
        for name in ("locks", "staging", "models", "caches", "trash"):
            (root / name).mkdir(mode=0o700, exist_ok=True)

    def models(self, key: str) -> Path:
        """Return where published weights lie."""
        return self.root / "models" / key

    def staging(self, key: str) -> Path:
        """Return where begun weights lie."""
        return self.root / "staging" / key

    def caches(self, key: str) -> Path:
        """Return the folder for what engines compile, made if need be."""
        folder = self.root / "caches" / key
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def published(self, key: str) -> bool:
        """Return whether the weights are there, whole."""
        return self.models(key).is_dir()

    def use(self, key: str) -> Use | None:
        """Hold published weights, if they are there and nobody evicts them just now; never waits."""
        descriptor = self._open(key)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if self.published(key):
                os.utime(descriptor)
                return Use(self.models(key), self.caches(key), descriptor)
        except BlockingIOError:
            pass
        os.close(descriptor)
        return None

    @contextlib.contextmanager
    def alone(self, key: str, *, wait: bool) -> Iterator[bool]:
        """Be the only one who stages or evicts ``key``; yields whether we are.

        Args:
            key: whose.
            wait: wait for whoever stages or uses it; else give up at once.
        """
        descriptor = self._open(key)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def reckoning(self) -> Iterator[None]:
        """Be the only one who decides what the disk has room for."""
        descriptor = os.open(self.root / "reckoning", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _open(self, key: str) -> int:
        return os.open(self.root / "locks" / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def entries(self) -> list[budget.Entry]:
        """Return what is on the disk; what changes meanwhile may be left out."""
        found: list[budget.Entry] = []
        locks = self._locks()
        for kind in ("models", "staging"):
            for folder in sorted((self.root / kind).iterdir()):
                key, whole = folder.name, kind == "models"
                with contextlib.suppress(FileNotFoundError):
                    there, busy = size_of(folder), bool(locks.get(key))
                    about = None if whole or not busy else self.about(key)
                    found.append(
                        budget.Entry(
                            key=key,
                            size=there + size_of(self.root / "caches" / key),
                            used_us=int((self.root / "locks" / key).stat().st_mtime * 1_000_000),
                            busy=busy,
                            whole=whole,
                            coming=0 if about is None else max(0, about.size - there),
                        )
                    )
        return found

    def about(self, key: str) -> About | None:
        """Return whose weights a key stands for; None: nothing is there, or it has just begun."""
        for folder in (self.models(key), self.staging(key)):
            with contextlib.suppress(OSError, ValueError, TypeError):
                return stored.read(About, json.loads((folder / ABOUT).read_text()))
        return None

    def evict(self, key: str) -> bool:
        """Remove weights with their caches; False if somebody uses or stages them."""
        with self.alone(key, wait=False) as ours:
            if not ours:
                return False
            return self.discard(key)

    def discard(self, key: str) -> bool:
        """Remove weights that only we hold: out of sight by a rename, then off the disk."""
        there = False
        for kind in ("models", "staging", "caches"):
            out = self.root / "trash" / f"{kind}-{key}.{os.getpid()}.{time.monotonic_ns()}"
            with contextlib.suppress(FileNotFoundError):
                (self.root / kind / key).rename(out)
                there = True
        self.sweep()
        return there

    def sweep(self) -> None:
        """Remove what was evicted, by this process or by one that was killed over it."""
        for folder in (self.root / "trash").iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def free(self) -> int:
        """Return the file system's free bytes."""
        return shutil.disk_usage(self.root).free

    def held(self) -> tuple[weights.Held, ...]:
        """Return what the disk holds, for reports."""
        users = self._locks()
        found: list[weights.Held] = []
        for entry in self.entries():
            about = self.about(entry.key)
            if about is not None:
                state = "staged" if entry.whole else "staging" if entry.busy else "begun"
                count = users.get(entry.key, 0) if entry.whole else 0
                found.append(
                    weights.Held(about.uri, about.digest, state, entry.size, count, entry.used_us)
                )
        return tuple(found)

    def _locks(self) -> dict[str, int]:
        """Return key to how many hold its lock, as the kernel's table says: to look, never to decide."""
        nodes = {path.stat().st_ino: path.name for path in (self.root / "locks").iterdir()}
        device = self.root.stat().st_dev
        marks = f"{os.major(device):02x}:{os.minor(device):02x}"
        counts: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line in Path("/proc/locks").read_text().splitlines():
                words = line.split()
                if "FLOCK" not in words or "->" in words:
                    continue
                where, _, node = words[5].rpartition(":")
                key = nodes.get(int(node)) if where == marks else None
                if key is not None:
                    counts[key] = counts.get(key, 0) + 1
        return counts


def size_of(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(inner) / name).stat(follow_symlinks=False).st_blocks * 512
    return total
