"""The supervisor's way to a replica's control paths, over one connection that stays open."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

CALL_S = 5.0
STATE_S = 4.0
_log = logging.getLogger(__name__)


class ControlError(Exception):
    """The replica did not answer as it should; the message is one line."""


class Control:
    """A replica's control paths.

    Args:
        session: the client; it must not use proxies from the environment.
        address: the replica's ``host:port``.
        secret: its bearer secret.
    """

    def __init__(self, session: aiohttp.ClientSession, address: str, secret: str) -> None:
        self._session = session
        self._base = f"http://{address}"
        self._headers = {"authorization": f"Bearer {secret}"}

    async def state(self) -> Mapping[str, Any]:
        """Return ``/forebay/state``."""
        return await self._call("GET", "/forebay/state", None, STATE_S)

    async def role(self, role: str) -> None:
        """Change the role; returns once batch has left, if it must."""
        await self._call("POST", "/forebay/role", {"role": role}, CALL_S)

    async def adapters(self, wanted: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        """Say which adapters it shall hold, name and folder; returns what it holds, after a while at most."""
        return await self._call("POST", "/forebay/adapters", {"wanted": list(wanted)}, CALL_S)

    async def drain(self) -> Mapping[str, Any]:
        """Take nothing new from now on; returns its state then."""
        return await self._call("POST", "/forebay/drain", {}, CALL_S)

    async def evict(self) -> None:
        """End what still runs, in a way that lets gateways go on with it elsewhere."""
        await self._call("POST", "/forebay/evict", {}, CALL_S)

    async def sleep(self, limit_s: float) -> Mapping[str, Any]:
        """Have a drained replica's engine sleep; returns ``failed``, and ``level`` and ``freed_bytes``."""
        return await self._call("POST", "/forebay/sleep", {}, limit_s)

    async def wake(self, role: str, incarnation: int, limit_s: float) -> Mapping[str, Any]:
        """Have it serve again; returns ``failed``, which is "" once it does."""
        body = {"role": role, "incarnation": incarnation}
        return await self._call("POST", "/forebay/wake", body, limit_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float
    ) -> Mapping[str, Any]:
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    method, self._base + path, json=body, headers=self._headers
                ) as response,
            ):
                if response.status != 200:
                    raise ControlError(f"{method} {path}: HTTP {response.status}")
                value: Mapping[str, Any] = await response.json()
                return value
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ControlError(f"{method} {path}: {type(error).__name__} {error}") from error


def client() -> aiohttp.ClientSession:
    """Return the client for control paths."""
    return aiohttp.ClientSession(
        trust_env=False, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    )


@contextlib.contextmanager
def lenient(replica_id: str, what: str) -> Iterator[None]:
    """Go on where a replica does not answer: whoever reads its state will judge it."""
    try:
        yield
    except ControlError as error:
        _log.warning("replica %s: %s: %s", replica_id, what, error)
