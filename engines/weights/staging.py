"""Fetches one set of weights to the node's disk: ranges in parallel, resumed, checked, published by a rename.

May be killed at any point. What is published is whole: every file has the SHA-256 that the place's manifest
(or the version's digest) says, and is on the disk before the rename makes it visible.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engines.weights import budget, examine, ledger, sources, store, task
from scheduler.contracts import weights

_HASH_BLOCK = 1024 * 1024  # stays in a core's cache between the copy and the hash
Step = Callable[[str], None]


class NoRoom(Exception):
    """The disk is full of what is in use; the message is one line. It may fit later."""


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """What came of a staging.

    Attributes:
        fetched: bytes that came from the place this time.
        size: bytes of the whole set.
        seconds: how long it took.
    """

    key: str
    digest: str
    fetched: int
    size: int
    seconds: float


class Staging:
    """One staging.

    Args:
        order: what.
        source: its place, opened.
        where: the disk.
        told: called with bytes on the disk and bytes in all, now and then; with 0 and 0 when it begins to
            wait for another staging of the same weights.
        step: called between steps that a kill may separate; for tests.
    """

    def __init__(
        self,
        order: task.Order,
        source: sources.Source,
        where: store.Store,
        told: Callable[[int, int], None] = lambda got, of: None,
        step: Step = lambda name: None,
    ) -> None:
        self._order = order
        self._source = source
        self._store = where
        self._told = told
        self._step = step
        self._folder = where.staging(order.key)
        self._fetched = 0
        self._there = 0
        self._lock = threading.Lock()

    def run(self) -> Done:
        """Stage, unless it is there; waits for another staging of the same weights.

        Raises:
            sources.SourceDown: the place does not answer; call again later.
            NoRoom: the disk is full of what is in use.
            weights.WeightsError: these weights can't be used as they are.
            OSError: the node's disk fails.
        """
        began = time.monotonic()
        key = self._order.key
        there = self._published(began)
        if there is not None:
            return there
        with self._store.alone(key, wait=False) as ours:
            if ours:
                return self._alone(began)
        self._told(0, 0)
        with self._store.alone(key, wait=True):
            return self._alone(began)

    def _alone(self, began: float) -> Done:
        key = self._order.key
        there = self._published(began)
        if there is not None:  # another process has staged it meanwhile
            return there
        manifest = self._fill()
        return Done(key, manifest.digest, self._fetched, manifest.size, time.monotonic() - began)

    def _published(self, began: float) -> Done | None:
        if not self._store.published(self._order.key):
            return None
        about = self._store.about(self._order.key)
        digest, size = (about.digest, about.size) if about is not None else ("", 0)
        return Done(self._order.key, digest, 0, size, time.monotonic() - began)

    def _fill(self) -> weights.Manifest:
        found = {one.name: one for one in self._source.files()}
        said = self._manifest(found)
        sizes = {name: one.size for name, one in found.items()}
        if said is not None:
            self._as_said(said, found)
            sizes = {file.name: file.size for file in said.files}
        look = examine.adapter if self._order.adapter else examine.examine
        summary = look(sizes, self._source.read, self._order.uri, unsafe=self._order.unsafe)
        names = summary.names
        if said is not None and (odd := sorted(sizes.keys() - set(names))):
            raise weights.WeightsError(
                f"{self._order.uri}/{weights.MANIFEST}: {odd[0]} is never staged (pickles, code, "
                "pictures): make it anew "
                "with `fctl weights manifest`"
            )
        expected = _expected(said, found)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._make_room(sum(sizes[name] for name in names))
        self._step("begin")
        book = ledger.Ledger(self._folder, tuple(found[name] for name in names))
        try:
            manifest = self._fetch(names, expected, book)
        finally:
            book.close()
        if self._order.digest and manifest.digest != self._order.digest:
            self._store.discard(self._order.key)
            raise self._other(manifest.digest)
        if any(name not in expected for name in names):
            self._unchanged(found, names)
        self._publish(manifest)
        return manifest

    def _unchanged(self, found: Mapping[str, sources.Found], names: tuple[str, ...]) -> None:
        """See that a place that tells no checksums is as it was: half of each of two versions looks whole.

        Raises:
            sources.SourceDown: it is not; the next try fetches what has changed.
        """
        now = {one.name: one for one in self._source.files()}
        for name in names:
            if now.get(name) != found[name]:
                raise sources.SourceDown(
                    f"{self._order.uri}/{name} changed while it was read: read anew"
                )

    def _manifest(self, found: Mapping[str, sources.Found]) -> weights.Manifest | None:
        """Return the manifest beside the weights at their place, if there is one."""
        at = found.get(weights.MANIFEST)
        if at is None:
            return None
        text = bytes(self._source.read(at.name, 0, at.size))
        return weights.Manifest.read(text, f"{self._order.uri}/{weights.MANIFEST}")

    def _as_said(self, said: weights.Manifest, found: Mapping[str, sources.Found]) -> None:
        """Compare the place with its manifest, before anything is fetched."""
        if self._order.digest and said.digest != self._order.digest:
            raise self._other(said.digest)
        for file in said.files:
            there = found.get(file.name)
            if there is None or there.size != file.size:
                how = (
                    "is missing"
                    if there is None
                    else f"has {there.size} bytes instead of {file.size}"
                )
                raise weights.WeightsError(f"{self._order.uri}/{file.name} {how}: upload it again")

    def _other(self, digest: str) -> weights.WeightsError:
        return weights.WeightsError(
            f"{self._order.uri}: its digest is {digest[:16]}…, the version wants "
            f"{self._order.digest[:16]}…: somebody "
            "has changed the files; put the old ones back, or register a new version"
        )

    def _make_room(self, size: int) -> None:
        """Evict what must go and note what comes, or say why it does not fit."""
        with self._store.reckoning():
            self._store.sweep()
            there = min(size, store.size_of(self._folder))
            entries = [one for one in self._store.entries() if one.key != self._order.key]
            room = budget.Room(self._store.free(), self._order.budget, self._order.reserve)
            verdict = budget.decide(size, there, entries, room)
            gb = 1e9
            if verdict.never:
                raise weights.WeightsError(
                    f"{self._order.uri}: {size / gb:.1f} GB do not fit into {self._store.root} "
                    "at all: raise [engines] "
                    "weights_budget_gb, or give the node a larger disk"
                )
            if verdict.lacking:
                raise NoRoom(
                    f"{self._order.uri}: {size / gb:.1f} GB, and {self._store.root} lacks "
                    f"{verdict.lacking / gb:.1f} GB: "
                    "what is there is in use"
                )
            if verdict.victims and self._order.ahead:
                raise NoRoom(f"{self._order.uri}: no room without evicting {verdict.victims[0]}")
            for key in verdict.victims:
                if not self._store.evict(key):
                    raise NoRoom(
                        f"{self._order.uri}: {key} came into use while it was to be evicted"
                    )
                self._step("evicted")
            # From now on whoever reckons knows of the bytes that are still to come.
            about = store.About(self._order.uri, self._order.digest, size)
            (self._folder / store.ABOUT).write_text(about.text())

    def _fetch(
        self, names: tuple[str, ...], expected: Mapping[str, str], book: ledger.Ledger
    ) -> weights.Manifest:
        with concurrent.futures.ThreadPoolExecutor(self._order.parallel, "staging") as pool:
            work: list[tuple[str, ledger.Range]] = []
            sizes = {name: book.size(name) for name in names}
            for name, missing in zip(names, pool.map(self._missing(book), names), strict=True):
                self._allocate(name, sizes[name])
                work += [(name, at) for at in missing]
            total = sum(sizes.values())
            self._there = total - sum(length for _, (_, length) in work)
            self._told(self._there, total)
            _all(pool, lambda item: self._range(item, book, total), work)
            files = list(pool.map(self._hashed, names))
            wrong = [one.name for one in files if expected.get(one.name, one.sha256) != one.sha256]
            if wrong:
                self._again(wrong, book, pool, expected)
                files = list(pool.map(self._hashed, names))
        return weights.Manifest(tuple(sorted(files)))

    def _missing(self, book: ledger.Ledger) -> Callable[[str], list[ledger.Range]]:
        return lambda name: book.missing(name, self._order.chunk)

    def _allocate(self, name: str, size: int) -> None:
        path = self._folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def _range(self, item: tuple[str, ledger.Range], book: ledger.Ledger, total: int) -> None:
        name, (start, length) = item
        data = self._source.read(name, start, length)
        if len(data) != length:
            raise weights.WeightsError(
                f"{self._order.uri}/{name}: ends at byte {start + len(data)} while it is read: "
                "it changes; stage it "
                "again once it is whole"
            )
        self._step("read")
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            view = memoryview(data)
            at = start
            while view:
                written = os.pwrite(descriptor, view, at)
                at += written
                view = view[written:]
        finally:
            os.close(descriptor)
        self._step("written")
        with self._lock:
            book.note(name, (start, length), data)
            self._fetched += length
            self._there += length
            self._told(self._there, total)
        self._step("noted")

    def _hashed(self, name: str) -> weights.File:
        found = hashed(self._folder, name, sync=True)
        self._step("hashed")
        return found

    def _again(
        self,
        wrong: list[str],
        book: ledger.Ledger,
        pool: concurrent.futures.ThreadPoolExecutor,
        expected: Mapping[str, str],
    ) -> None:
        """Fetch files with a wrong SHA-256 once more: a transfer may have gone wrong, a place stays wrong."""
        work: list[tuple[str, ledger.Range]] = []
        for name in wrong:
            book.forget(name)
            self._allocate(name, book.size(name))
            work += [(name, at) for at in book.missing(name, self._order.chunk)]
        _all(pool, lambda item: self._range(item, book, 0), work)
        for file in pool.map(self._hashed, wrong):
            if file.sha256 != expected[file.name]:
                book.forget(file.name)
                raise weights.WeightsError(
                    f"{self._order.uri}/{file.name}: its SHA-256 is {file.sha256[:16]}…, the "
                    "manifest says "
                    f"{expected[file.name][:16]}…: damaged at its place, upload it again"
                )

    def _publish(self, manifest: weights.Manifest) -> None:
        """Make the weights visible: everything on the disk first, then one rename."""
        (self._folder / ledger.NAME).unlink(missing_ok=True)
        about = store.About(self._order.uri, manifest.digest, manifest.size)
        for name, text in ((weights.MANIFEST, manifest.text()), (store.ABOUT, about.text())):
            with (self._folder / name).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for folder, _, _ in os.walk(self._folder, topdown=False):
            _sync(Path(folder))
        self._step("synced")
        target = self._store.models(self._order.key)
        self._folder.rename(target)
        self._step("renamed")
        _sync(target.parent)
        _sync(self._folder.parent)


def hashed(folder: Path, name: str, *, sync: bool = False) -> weights.File:
    """Return a file's size and SHA-256, read from the disk, with everything of it on the disk if ``sync``."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_HASH_BLOCK))
    size = 0
    with (folder / name).open("rb", buffering=0) as file:
        while got := file.readinto(block):
            digest.update(block[:got])
            size += got
        if sync:
            os.fsync(file.fileno())
    return weights.File(name, size, digest.hexdigest())


def compared(where: store.Store, key: str) -> tuple[int, str]:
    """Return the bytes of published weights, and the first file that is not as their manifest says, or "".

    Raises:
        weights.WeightsError: they are not there.
    """
    folder = where.models(key)
    try:
        said = weights.Manifest.read((folder / weights.MANIFEST).read_bytes(), str(folder))
    except OSError as error:
        raise weights.WeightsError(f"{folder}: not on this node's disk") from error
    for file in said.files:
        try:
            right = hashed(folder, file.name) == file
        except OSError:
            right = False
        if not right:
            return said.size, file.name
    return said.size, ""


def _expected(said: weights.Manifest | None, found: Mapping[str, sources.Found]) -> dict[str, str]:
    """Return name to SHA-256, as far as the manifest or the place knows it."""
    if said is not None:
        return {file.name: file.sha256 for file in said.files}
    return {name: one.sha256 for name, one in found.items() if one.sha256}


def _all(
    pool: concurrent.futures.ThreadPoolExecutor,
    act: Callable[[tuple[str, ledger.Range]], None],
    work: list[tuple[str, ledger.Range]],
) -> None:
    """Do all of ``work``; the first fault ends what has not begun."""
    futures = [pool.submit(act, item) for item in work]
    try:
        for future in concurrent.futures.as_completed(futures):
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
