"""Weights by name: where a version's files come from, what they must be, and what a node's disk holds.

A place is `file:///folder` (a shared file system), `s3://bucket/prefix` or `hf://owner/name@revision`. A
plain path is no place: what lies there is loaded where it lies. No decisions, no I/O.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMES = ("file", "s3", "hf")
MANIFEST = "forebay-manifest.json"  # beside the weights, at their source and on a node's disk
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REPOSITORY = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
_REVISION = re.compile(r"[A-Za-z0-9._/-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class WeightsError(ValueError):
    """Weights that can't be used as they are; the message says which, why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where weights come from.

    Attributes:
        scheme: one of `SCHEMES`.
        root: "" (file), the bucket (s3), or ``owner/name`` (hf).
        path: an absolute folder (file), or a prefix without slashes at its ends (s3); "" for hf.
        revision: of a hf repository: a commit, tag or branch; "" elsewhere.
    """

    scheme: str
    root: str
    path: str
    revision: str = ""

    def __str__(self) -> str:
        """Return it as it is written."""
        if self.scheme == "hf":
            return f"hf://{self.root}@{self.revision}"
        return f"{self.scheme}://{self.root}{'/' if self.scheme == 's3' else ''}{self.path}"


def staged(text: str) -> bool:
    """Return whether weights named so are staged to a node's disk; a plain path is not."""
    return "://" in text and text.partition("://")[0] not in {"http", "https"}


def parse(text: str) -> Place:
    """Return the place that a URI names.

    Raises:
        WeightsError: it is none; the message says what to write.
    """
    scheme, sign, rest = text.partition("://")
    if not sign or scheme not in SCHEMES:
        raise WeightsError(
            f"weights {text!r}: write file:///folder, s3://bucket/prefix or hf://owner/name@revision"
        )
    if not text.isprintable() or any(mark in rest for mark in "?#\\ "):
        raise WeightsError(f"weights {text!r}: a place has no query, no fragment and no blanks")
    if ".." in rest.split("/"):
        raise WeightsError(
            f"weights {text!r}: `..` leads out of the folder that is named; write where it leads"
        )
    if scheme == "file":
        return _file(text, rest)
    if scheme == "s3":
        return _s3(text, rest)
    repository, _, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(repository) or not _REVISION.fullmatch(revision):
        raise WeightsError(
            f"weights {text!r}: write hf://owner/name@revision; without a revision nodes would hold "
            "different weights"
        )
    return Place("hf", repository, "", revision)


def _file(text: str, rest: str) -> Place:
    if not rest.startswith("/") or not rest.strip("/"):
        raise WeightsError(
            f"weights {text!r}: write file:///absolute/folder, on a file system that nodes see"
        )
    return Place("file", "", rest.rstrip("/"))


def _s3(text: str, rest: str) -> Place:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise WeightsError(
            "weights s3://…@…: a credential in a name would be in every log; put it into the agents' "
            "environment (AWS_ACCESS_KEY_ID, AWS_PROFILE or a role)"
        )
    if not _BUCKET.fullmatch(bucket) or not prefix.strip("/"):
        raise WeightsError(f"weights {text!r}: write s3://bucket/prefix")
    return Place("s3", bucket, prefix.strip("/"))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class File:
    """One file of a set of weights: its name below the folder, its bytes, and their SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What a set of weights is, file by file, sorted by name."""

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Return the SHA-256 over its lines (`sha256 size name`): the same for the same bytes anywhere."""
        lines = "".join(
            f"{one.sha256} {one.size} {one.name}\n" for one in sorted(self.files, key=_name)
        )
        return hashlib.sha256(lines.encode()).hexdigest()

    def text(self) -> str:
        """Return it as the text of its file."""
        files = [dataclasses.asdict(one) for one in sorted(self.files, key=_name)]
        return json.dumps({"digest": self.digest, "files": files}, indent=1) + "\n"

    @classmethod
    def read(cls, text: str | bytes, where: str) -> "Manifest":
        """Read what `text` wrote.

        Args:
            text: the file's content.
            where: its name, for messages.

        Raises:
            WeightsError: it is not well formed, or its digest is not that of its files.
        """
        try:
            body: Mapping[str, Any] = json.loads(text)
            files: Sequence[Mapping[str, Any]] = body["files"]
            found = cls(
                tuple(sorted(File(str(f["name"]), int(f["size"]), str(f["sha256"])) for f in files))
            )
            said = body["digest"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(
                f"{where}: no manifest of Forebay's ({error}): make it with `fctl weights manifest`"
            ) from error
        for file in found.files:
            check_name(file.name, where)
            if not _SHA256.fullmatch(file.sha256) or file.size < 0:
                raise WeightsError(
                    f"{where}: {file.name}: wrong size or SHA-256; make it anew with `fctl weights manifest`"
                )
        if said != found.digest:
            raise WeightsError(
                f"{where}: its digest is not that of its files; make it anew with `fctl weights manifest`"
            )
        return found


def _name(file: File) -> str:
    return file.name


def check_name(name: str, where: str) -> None:
    """Refuse a file's name that leads out of its folder.

    Raises:
        WeightsError: it does.
    """
    parts = name.split("/")
    if (
        not name
        or name.startswith("/")
        or not name.isprintable()
        or any(part in {"", ".", ".."} for part in parts)
    ):
        raise WeightsError(
            f"{where}: {name!r} is no name of a file below the folder of the weights"
        )


def key(uri: str, digest: str = "") -> str:
    """Return the name under which a node keeps weights: readable, and one for each place and digest."""
    slug = (
        re.sub(r"[^A-Za-z0-9._-]+", "-", uri.partition("://")[2].strip("/"))[-40:].strip("-.")
        or "weights"
    )
    return f"{slug}.{hashlib.sha256(f'{uri} {digest}'.encode()).hexdigest()[:16]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a node's disk holds of one set of weights.

    Attributes:
        state: staged, staging or waiting (its source does not answer).
        size: bytes on the disk.
        users: replicas on the node that use it now; never evicted while there are any.
        used_us: UTC µs when it was last used.
        reason: why it waits, or "".
    """

    uri: str
    digest: str
    state: str
    size: int
    users: int = 0
    used_us: int = 0
    reason: str = ""
