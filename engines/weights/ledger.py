"""What of a begun staging is on the disk: one line a range, with a checksum, so that a killed one goes on.

A line is written after its range. A line that is torn, or whose range does not have its checksum any more
(a machine that lost power), is as good as none.
"""

import json
import os
from pathlib import Path

import xxhash

from engines.weights import sources

NAME = ".forebay-ledger"
Range = tuple[int, int]  # start, length


class Ledger:
    """The ranges of one begun staging.

    Args:
        folder: the staging folder.
        found: the files as their place has them now; what belongs to other content is forgotten.
    """

    def __init__(self, folder: Path, found: tuple[sources.Found, ...]) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._found = {one.name: one for one in found}
        self._done: dict[str, dict[Range, str]] = {}
        self._read()
        self._file = self._path.open("ab", buffering=0)

    def _read(self) -> None:
        kept: list[bytes] = []
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                name, identity, start, length, checksum = json.loads(line)
            except (ValueError, TypeError):
                continue
            known = self._found.get(name)
            if known is None or known.identity != identity or not isinstance(checksum, str):
                continue
            self._done.setdefault(name, {})[(int(start), int(length))] = checksum
            kept.append(line)
        # Written anew: a torn last line would swallow the next one.
        fresh = self._path.with_name(f"{NAME}.new")
        fresh.write_bytes(b"".join(line + b"\n" for line in kept))
        fresh.replace(self._path)

    def size(self, name: str) -> int:
        """Return a file's bytes."""
        return self._found[name].size

    def note(self, name: str, at: Range, data: bytes | memoryview) -> None:
        """Note that a range has been written."""
        checksum = xxhash.xxh3_64_hexdigest(data)
        self._done.setdefault(name, {})[at] = checksum
        line = json.dumps([name, self._found[name].identity, *at, checksum])
        self._file.write(line.encode() + b"\n")

    def missing(self, name: str, chunk: int) -> list[Range]:
        """Return the ranges of a file that are still to be fetched; what is on the disk is checked."""
        size = self._found[name].size
        path = self._folder / name
        wanted = [(start, min(chunk, size - start)) for start in range(0, size, chunk)]
        done = self._done.get(name, {})
        if not done or not path.exists():
            return wanted
        with path.open("rb", buffering=0) as file:
            return [at for at in wanted if not self._holds(file.fileno(), at, done.get(at))]

    @staticmethod
    def _holds(descriptor: int, at: Range, checksum: str | None) -> bool:
        if checksum is None:
            return False
        start, length = at
        return xxhash.xxh3_64_hexdigest(os.pread(descriptor, length, start)) == checksum

    def forget(self, name: str) -> None:
        """Forget a file whose content turned out wrong."""
        self._done.pop(name, None)
        self._file.write(json.dumps([name, "", 0, 0, ""]).encode() + b"\n")
        (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close its file."""
        self._file.close()
