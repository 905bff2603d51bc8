"""The control token: one secret of the state folder that every control call must carry."""

import contextlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc import aio

FILE = Path("secrets") / "control.token"


def token(state_dir: Path) -> str:
    """Return the state folder's control token; make it first if there is none (mode 0600)."""
    return kept(state_dir / FILE, lambda: secrets.token_hex(32))


def kept(path: Path, make: Callable[[], str]) -> str:
    """Return the secret in ``path``; without one, what ``make`` returns is kept there first (mode 0600).

    Of several processes that start together one makes it and all return the same.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(make())
    try:
        # A link fails if another process was first; then its secret counts.
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()
    return path.read_text(encoding="ascii").strip()


def metadata(value: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a caller sends."""
    return (("authorization", f"Bearer {value}"),)


class Guard:
    """Refuses calls without the control token."""

    def __init__(self, value: str) -> None:
        self._expected = f"Bearer {value}".encode()

    async def check(self, context: "aio.ServicerContext[object, object]") -> None:
        """End the call as UNAUTHENTICATED unless it bears the token."""
        given = b""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                given = value.encode() if isinstance(value, str) else value
        if not hmac.compare_digest(given, self._expected):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"control token missing or wrong: use the one in {FILE} of the state folder",
            )
