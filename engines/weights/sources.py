"""Places that weights come from: a shared folder, S3, a Hugging Face repository; all read by byte ranges.

A `Source` tells two kinds of trouble apart: `SourceDown` (try again later) and `weights.WeightsError` (it
will never work as it is).
"""

import configparser
import dataclasses
import datetime
import os
import re
import stat
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import obstore
from obstore import exceptions
from obstore import store as stores

from engines.weights import task
from scheduler.contracts import weights

T = TypeVar("T")
_TIMEOUT_S = 60.0  # of one range; a 16 MiB range at 1 MB/s takes 17 s
_STATUS = re.compile(r"status code: (\d{3})")  # as obstore spells an answer that it has no word for
_CODE = re.compile(r"<Code>(\w+)</Code>")  # S3's own
_RETRIES = 3  # of one range, within `_TIMEOUT_S`; beyond it the whole staging waits and says so


class SourceDown(Exception):
    """The place does not answer now; the message is one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A file at its place.

    Attributes:
        identity: changes with the content: an ETag, or size and time of change.
        sha256: as far as the place knows it, else "".
    """

    name: str
    size: int
    identity: str
    sha256: str = ""


class Source(Protocol):
    """Where a set of weights lies."""

    def files(self) -> tuple[Found, ...]:
        """Return the files, sorted by name.

        Raises:
            SourceDown: it does not answer.
            weights.WeightsError: there is nothing, or nothing that we may read.
        """
        ...

    def read(self, name: str, start: int, length: int) -> bytes | memoryview:
        """Return ``length`` bytes of a file from ``start``; fewer only where the file ends.

        Raises:
            SourceDown: it does not answer.
            weights.WeightsError: the file is gone, or we may not read it.
        """
        ...


def of(place: weights.Place, options: task.Options) -> Source:
    """Return the source of a place.

    Raises:
        weights.WeightsError: what it needs is not there.
    """
    if place.scheme == "file":
        return Folder(Path(place.path))
    if place.scheme == "s3":
        return Bucket(place, options)
    return Repository.open(place)


class Folder:
    """A folder on a file system that this node sees."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> tuple[Found, ...]:
        """Return the files below the folder, hidden ones left out."""
        if not self._folder.is_dir():
            if self._folder.parent.is_dir():
                raise weights.WeightsError(
                    f"{self._folder}: no such folder; correct the version's weights"
                )
            # A file system that is not mounted is no reason to give the model up.
            raise SourceDown(f"{self._folder}: not there; is its file system mounted on this node?")
        found: list[Found] = []
        for folder, inner, names in os.walk(self._folder, followlinks=False):
            inner[:] = [name for name in inner if not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if name.startswith("."):
                    continue
                about = self._guarded(path, path.stat)
                if not stat.S_ISREG(about.st_mode):
                    raise weights.WeightsError(f"{path}: is no file: take it out of the folder")
                identity = f"{about.st_size} {about.st_mtime_ns}"
                found.append(Found(str(path.relative_to(self._folder)), about.st_size, identity))
        return tuple(sorted(found, key=lambda one: one.name))

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a range."""
        path = self._folder / name

        def ask() -> bytes:
            # A pipe that has come in its place would never open, nor end.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.pread(descriptor, length, start)
            finally:
                os.close(descriptor)

        return self._guarded(path, ask)

    @staticmethod
    def _guarded(path: Path, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except PermissionError as error:
            raise weights.WeightsError(
                f"{path}: the user of the agents may not read it; chmod a+r it"
            ) from error
        except OSError as error:
            raise SourceDown(f"{path}: {error.strerror}") from error


class Bucket:
    """A prefix in an S3 bucket."""

    def __init__(self, place: weights.Place, options: task.Options) -> None:
        self._place = place
        config: dict[str, Any] = {}
        if options.s3_endpoint:
            config["endpoint"] = options.s3_endpoint
        if options.s3_region or "AWS_REGION" not in os.environ:
            config["region"] = options.s3_region or os.environ.get(
                "AWS_DEFAULT_REGION", "us-east-1"
            )
        if options.s3_credentials:
            config |= credentials(Path(options.s3_credentials))
        self._store = stores.S3Store(
            place.root,
            prefix=place.path,
            client_options={
                "allow_http": options.s3_endpoint.startswith("http://"),
                "timeout": f"{_TIMEOUT_S:g}s",
                "connect_timeout": "5s",
            },
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": datetime.timedelta(seconds=_TIMEOUT_S),
            },
            **config,
        )

    def files(self) -> tuple[Found, ...]:
        """Return the objects below the prefix."""
        listed = self._guarded(
            "", lambda: [one for page in obstore.list(self._store) for one in page]
        )
        if not listed:
            raise weights.WeightsError(
                f"{self._place}: nothing lies there; check bucket and prefix"
            )
        return tuple(
            sorted(
                (
                    Found(one["path"], one["size"], one["e_tag"] or str(one["last_modified"]))
                    for one in listed
                ),
                key=lambda one: one.name,
            )
        )

    def read(self, name: str, start: int, length: int) -> memoryview:
        """Read a range."""
        got = self._guarded(
            name, lambda: obstore.get_range(self._store, name, start=start, length=length)
        )
        return memoryview(got)

    def _guarded(self, name: str, ask: Callable[[], T]) -> T:
        what = f"{self._place}/{name}".rstrip("/")
        try:
            return ask()
        except FileNotFoundError as error:
            raise weights.WeightsError(
                f"{what}: not there; upload it or correct the version's weights"
            ) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self._denied(what, error) from error
        except (exceptions.BaseError, OSError) as error:
            # A list that is refused, or of no bucket, has no exception of its own.
            found = _STATUS.search(str(error))
            status = found[1] if found else ""
            if status in {"401", "403"}:
                raise self._denied(what, error) from error
            if status == "404":
                raise weights.WeightsError(f"{what}: no such bucket; correct the place") from error
            raise SourceDown(f"{what}: {_first_words(error)}") from error

    @staticmethod
    def _denied(what: str, error: Exception) -> weights.WeightsError:
        code = _CODE.search(str(error))
        return weights.WeightsError(
            f"{what}: access denied{f' ({code[1]})' if code else ''}; give the agents' credentials "
            "s3:GetObject and s3:ListBucket"
        )


def credentials(path: Path) -> dict[str, str]:
    """Return the key of an AWS credentials file's profile ``default``.

    Raises:
        weights.WeightsError: it can't be read, others may read it, or it has no key.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        if path.stat().st_mode & 0o077:
            raise weights.WeightsError(f"{path}: others may read these credentials; chmod 600 it")
        parser.read_string(path.read_text())
        body: Mapping[str, str] = parser["default"]
        key = {
            "access_key_id": body["aws_access_key_id"],
            "secret_access_key": body["aws_secret_access_key"],
        }
    except OSError as error:
        raise weights.WeightsError(f"{path}: S3 credentials: {error.strerror}") from error
    except (configparser.Error, KeyError) as error:
        raise weights.WeightsError(
            f"{path}: needs [default] with aws_access_key_id and aws_secret_access_key"
        ) from error
    if "aws_session_token" in body:
        key["session_token"] = body["aws_session_token"]
    return key


class Repository:
    """A repository of the Hugging Face Hub, at one commit. Not run against the real hub."""

    def __init__(self, place: weights.Place, hub: Any, client: Any) -> None:
        self._place = place
        self._hub = hub
        self._client = client
        self._commit = place.revision

    @classmethod
    def open(cls, place: weights.Place) -> "Repository":
        """Return the source.

        Raises:
            weights.WeightsError: the package is missing.
        """
        try:
            import huggingface_hub
        except ImportError as error:
            raise weights.WeightsError(
                f"{place}: needs the package huggingface-hub: install forebay[hub] on the nodes"
            ) from error
        import httpx

        return cls(place, huggingface_hub, httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S))

    def files(self) -> tuple[Found, ...]:
        """Return the files of the commit that the revision names now; later reads are of that commit."""
        told = self._guarded(
            "",
            lambda: self._hub.HfApi().model_info(
                self._place.root, revision=self._place.revision, files_metadata=True
            ),
        )
        self._commit = str(told.sha)
        return tuple(
            sorted(
                (
                    Found(
                        one.rfilename,
                        int(one.size),
                        str(one.blob_id),
                        str(one.lfs.sha256) if one.lfs is not None else "",
                    )
                    for one in told.siblings
                    if not one.rfilename.startswith(".")
                ),
                key=lambda one: one.name,
            )
        )

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a range."""
        url = self._hub.hf_hub_url(self._place.root, name, revision=self._commit)
        headers = {
            **self._hub.utils.build_hf_headers(),
            "range": f"bytes={start}-{start + length - 1}",
        }

        def ask() -> bytes:
            answer = self._client.get(url, headers=headers)
            answer.raise_for_status()
            content = typing.cast(bytes, answer.content)
            # A server that does not know ranges answers 200 with the whole file.
            return content if answer.status_code == 206 else content[start : start + length]

        return self._guarded(name, ask)

    def _guarded(self, name: str, ask: Callable[[], T]) -> T:
        what = f"{self._place} {name}".rstrip()
        try:
            return ask()
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in {401, 403, 404}:
                raise weights.WeightsError(
                    f"{what}: HTTP {status}; correct the name, or give the agents a token "
                    "(HF_TOKEN_PATH)"
                ) from error
            raise SourceDown(f"{what}: {_first_words(error)}") from error


def _first_words(error: Exception) -> str:
    return " ".join(str(error).partition("Debug source")[0].split())[:300] or type(error).__name__
