"""Tokens for slurmrestd: signed here with Slurm's JWT key, or read from a file that somebody renews."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path

from scheduler.contracts import clock as clocks
from scheduler.contracts import slurm

LIFETIME_S = 600
_RENEW_S = 60


def sign(key: bytes, user: str, *, now_s: int, lifetime_s: int = LIFETIME_S) -> str:
    """Return a token for ``user`` as ``scontrol token`` makes it (JWT, HS256)."""
    claims = {"exp": now_s + lifetime_s, "iat": now_s, "sun": user}
    parts = [
        _encode(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims)
    ]
    signed = ".".join(parts)
    digest = hmac.new(key, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{_encode(digest)}"


def from_key(file: Path, user: str, clock: clocks.Clock | None = None) -> Callable[[], str]:
    """Return a provider that signs a new token whenever the last one nears its end.

    Raises:
        slurm.SlurmRefused: when called, if the key can't be read.
    """
    ticking = clock or clocks.SystemClock()
    last = ("", 0)

    def token() -> str:
        nonlocal last
        now = ticking.wall_us() // 1_000_000
        if not last[0] or now >= last[1] - _RENEW_S or now < last[1] - LIFETIME_S:
            last = (sign(_read(file), user, now_s=now), now + LIFETIME_S)
        return last[0]

    return token


def from_file(file: Path) -> Callable[[], str]:
    """Return a provider that reads the file anew for each call."""
    return lambda: _read(file).decode(errors="replace").strip()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise slurm.SlurmRefused(
            f"slurmrestd: {file} can't be read ({error.strerror}); check [slurm] jwt_key_file"
        ) from error


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
