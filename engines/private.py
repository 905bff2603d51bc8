"""Files that only we may read: secrets, tokens, launch records."""

import os
import secrets
from pathlib import Path


class PrivateFileError(ValueError):
    """A private file is missing, empty or open to others; the message says which and what to do."""


def folder(path: Path) -> Path:
    """Make a folder that only we may enter, and return it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write(path: Path, text: str) -> None:
    """Write a file with mode 0600, whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.replace(path)


def new_secret(path: Path) -> str:
    """Write a new random secret to ``path`` and return it."""
    secret = secrets.token_urlsafe(32)
    write(path, secret)
    return secret


def read(path: Path) -> str:
    """Return a secret.

    Raises:
        PrivateFileError: it can't be read, is empty, or others may read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise PrivateFileError(f"{path}: others may read this secret; chmod 600 it")
        text = path.read_text().strip()
    except OSError as error:
        raise PrivateFileError(f"secret: {error}") from error
    if not text:
        raise PrivateFileError(f"{path}: the secret is empty")
    return text
