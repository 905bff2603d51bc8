"""Turns an Authorization header into a caller: an API key, or a MUNGE credential of a Unix user."""

import asyncio
import collections
import hashlib
import re
import subprocess
from concurrent import futures

from gateway import settings
from scheduler.contracts import clock, errors, ports, requests

_CACHED = 10_000
_UID = re.compile(r"^UID:\s+(\S+) \((\d+)\)\s*$", re.MULTILINE)
_STATUS = re.compile(r"^STATUS:\s+(.+?) \((\d+)\)\s*$", re.MULTILINE)
_CREDENTIAL_AT_FAULT = range(
    8, 19
)  # unmunge exits with munge_err_t: EMUNGE_BAD_CRED to _UNAUTHORIZED
_CREDENTIAL = re.compile(r"MUNGE:[A-Za-z0-9+/=]+:")


class Credentials:
    """The real `ports.Authenticator`.

    Args:
        keys: finds API keys.
        directory: knows the team of a Unix user; None where MUNGE is not offered.
        time: the clock, for the age of cached keys.
        options: the [gateway] table.
    """

    def __init__(
        self,
        keys: ports.KeyStore,
        directory: ports.Directory | None,
        time: clock.Clock,
        options: settings.GatewaySettings,
    ) -> None:
        self._keys = keys
        self._directory = directory
        self._clock = time
        self._options = options
        # Its own threads: a flood of credentials must not keep the disk and the registry waiting.
        self._checkers = futures.ThreadPoolExecutor(options.munge_parallel, "unmunge")
        self._checking = 0
        self._cache: collections.OrderedDict[bytes, tuple[float, requests.Caller]] = (
            collections.OrderedDict()
        )

    async def authenticate(self, authorization: str | None) -> requests.Caller:
        """Return who the credential is; raises as the port says."""
        scheme, _, credential = (authorization or "").partition(" ")
        credential = credential.strip()
        if scheme.lower() == "bearer" and credential:
            return await self._bearer(credential)
        if scheme.lower() == "munge" and credential:
            return await self._munge(credential)
        raise errors.Unauthenticated(
            "no credential: send `Authorization: Bearer <API key>`; make one with `fctl key create`"
        )

    async def _bearer(self, token: str) -> requests.Caller:
        # Looked up by hash, so neither the time taken nor a memory dump tells a token.
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        now = self._clock.monotonic()
        cached = self._cache.get(digest)
        if cached is not None and cached[0] > now:
            return cached[1]
        self._cache.pop(digest, None)
        caller = await self._keys.find(token)
        self._cache[digest] = (now + self._options.key_cache_s, caller)
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return caller

    async def _munge(self, credential: str) -> requests.Caller:
        if self._directory is None:
            raise errors.Unauthenticated("MUNGE is not offered here: use an API key")
        if not _CREDENTIAL.fullmatch(credential):
            raise errors.Unauthenticated("not a MUNGE credential: make one with `munge -n`")
        if self._checking >= self._options.munge_parallel + self._options.munge_waiting:
            raise errors.Busy(
                "too many MUNGE credentials are being checked: try again, or use an API key",
                retry_after_s=1.0,
            )
        self._checking += 1
        checked = asyncio.get_running_loop().run_in_executor(
            self._checkers, unmunge, credential, self._options
        )
        checked.add_done_callback(self._checked)
        user = await checked
        return await self._directory.caller(user)

    def _checked(self, _: "asyncio.Future[str]") -> None:
        """One less; also where the caller has left meanwhile: its turn had not come, or nobody listens."""
        self._checking -= 1


def unmunge(credential: str, options: settings.GatewaySettings) -> str:
    """Return the Unix user behind a credential; munged itself refuses replayed and expired ones.

    Blocks for at most `munge_timeout_s`.

    Raises:
        errors.Unauthenticated: the credential is no good.
        errors.Internal: munge is not there, or does not answer.
    """
    socket = [f"--socket={options.munge_socket}"] if options.munge_socket else []
    try:
        done = subprocess.run(
            ["unmunge", *socket, "--output=/dev/null"],
            input=credential.encode(),
            capture_output=True,
            timeout=options.munge_timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise errors.Internal(
            "unmunge is not installed on the gateway's host: install munge, or use an API key"
        ) from None
    except subprocess.TimeoutExpired:
        raise errors.Internal(
            f"munged did not answer within {options.munge_timeout_s:g} s: see `systemctl status "
            "munge` on the gateway's host, or use an API key"
        ) from None
    answer = done.stdout.decode("utf-8", "replace")
    status, uid = _STATUS.search(answer), _UID.search(answer)
    words = " ".join(done.stderr.decode("utf-8", "replace").split())[:200]
    if done.returncode in _CREDENTIAL_AT_FAULT:
        why = status.group(1) if status else words.removeprefix("unmunge: Error: ")
        raise errors.Unauthenticated(f"MUNGE credential refused: {why}; make a new one")
    if done.returncode != 0:
        raise errors.Internal(f"{words}: is munged running on the gateway's host?")
    if uid is None or uid.group(1) == "???":
        raise errors.Unauthenticated("MUNGE: the user has no name on the gateway's host")
    return uid.group(1)
