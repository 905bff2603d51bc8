"""Which Parquet files count: one small JSON file, swapped atomically.

Readers take their files from here and never from a directory listing, so that a half-done pass of the
shipper is invisible. Each file has its SHA-256, since DuckDB checks no page checksums. Files that a
compaction replaced stay listed as retired for a while before they are unlinked, so that a reader which
holds the former manifest still finds them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

NAME = "manifest.json"
DAY = -1
_TEMPORARY = ".tmp"


class ManifestDamaged(Exception):
    """The manifest can't be read, or is missing where Parquet files are: restore it from a backup."""


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """One Parquet file.

    Attributes:
        path: relative to the parquet folder.
        day: UTC day of its rows.
        first_us, last_us: the earliest beginning and the latest end among its rows.
        since: the generation in which the newest of its rows came in; a compaction keeps it, so that
            rollups see which days have rows that they do not know.
        merged: it holds one row for each attempt, and no other merged file has one of the same. Only
            what is not merged has to be merged with it when it is read.
        hour: which UTC hour of the day it was made of while the day went on; `DAY` for every other file.
    """

    path: str
    table: str
    day: str
    rows: int
    bytes: int
    sha256: str
    first_us: int
    last_us: int
    since: int = 0
    merged: bool = False
    hour: int = DAY


_FIELDS = frozenset(field.name for field in dataclasses.fields(File))


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """One generation.

    Attributes:
        segments: spool segments whose rows are in `files`, and when they were shipped (UTC µs);
            kept for a while after the segment is gone, for readers who read it before.
        retired: files that a compaction replaced, and when (UTC µs); unlinked when no reader can want them.
    """

    generation: int = 0
    files: tuple[File, ...] = ()
    segments: Mapping[str, int] = dataclasses.field(default_factory=dict)
    retired: Mapping[str, int] = dataclasses.field(default_factory=dict)


def load(folder: Path) -> Manifest | None:
    """Read the manifest of a parquet folder; None if there is none yet.

    Raises:
        ManifestDamaged: it is not readable, or missing although there are files.
    """
    path = folder / NAME
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        files = tuple(
            File(**{name: found for name, found in each.items() if name in _FIELDS})
            for each in value["files"]
        )
        return Manifest(value["generation"], files, dict(value["segments"]), dict(value["retired"]))
    except FileNotFoundError:
        if next(folder.glob("*/day=*/*.parquet"), None) is not None:
            raise ManifestDamaged(
                f"{path} is missing although there are Parquet files: restore it from a backup"
            ) from None
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestDamaged(
            f"{path} can't be read ({error}): restore it from a backup"
        ) from error


def save(folder: Path, manifest: Manifest) -> None:
    """Swap the manifest; after a crash there is the old one or the new one."""
    files = [{name: getattr(each, name) for name in _FIELDS} for each in manifest.files]
    text = json.dumps(
        {
            "generation": manifest.generation,
            "files": files,
            "segments": dict(manifest.segments),
            "retired": dict(manifest.retired),
        },
        sort_keys=True,
    )
    write_durably(folder / NAME, text.encode())


def write_durably(path: Path, data: bytes) -> None:
    """Put a whole file under its name, on disk."""
    with writing(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears whole, or not at all: temporary, fsync, rename, fsync of the folder."""
    # Hidden, so that no glob for data matches it, and each writer's own: two may write the same file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        with os.fdopen(handle, "wb", closefd=False) as stream:
            yield stream
        os.fsync(handle)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    os.rename(temporary, path)  # noqa: PTH104 - os's own names, so that a test can stop at each step
    sync_folder(path.parent)


def clear(folder: Path) -> None:
    """Remove what killed writers of the manifest left; only for who holds the folder's lock."""
    for path in folder.glob(f".{NAME}.*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
