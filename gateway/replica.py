"""The hop to a replica: one POST, frames back, and every way it can fail told apart."""

import asyncio
import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from gateway import settings
from scheduler.contracts import errors, fleet, frames, ids, usage

_IDLE_CONNECTION_S = 60.0  # far below a replica's own 300 s, so that it never closes first
_IDENTITY = tuple(field.name for field in dataclasses.fields(usage.Identity))
_JSON_SAFE = '{}":,/ '  # harmless in a header, and most identities then need no quoting at all
_FINISH_S = 0.05
_ERROR_BYTES = 64 * 1024
_MESSAGE_CHARS = 2000  # an engine may echo the whole input in its error; nobody reads more


class Full(Exception):
    """The replica has no seat; nothing was computed."""


class Lost(Exception):
    """The replica broke off, could not be reached, or answered nonsense.

    Args:
        reason: one line.
        computed: whether tokens may have been computed.
        kind: `errors.ReplicaLost`, or that it leaves as planned, or failed on this request and lives on.
        counted: what it said that it had computed, if it still could.
    """

    def __init__(
        self,
        reason: str,
        *,
        computed: bool,
        kind: type[errors.ReplicaLost] = errors.ReplicaLost,
        counted: frames.Error | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.computed = computed
        self.kind = kind
        self.counted = counted


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What is sent.

    Attributes:
        path: the engine's route.
        body: the JSON body's bytes.
        identity: the attempt, for the replica's own usage row.
        silence_s: seconds without a byte after which the replica counts as lost.
    """

    path: str
    body: bytes
    identity: usage.Identity
    silence_s: float


class Client:
    """Keeps connections to replicas, and their secrets.

    Use as an async context manager.
    """

    def __init__(self, options: settings.GatewaySettings) -> None:
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._secrets: dict[tuple[ids.ReplicaId, int], str] = {}

    async def __aenter__(self) -> "Client":
        """Open the pool; proxies from the environment are never used inside the cluster."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE_CONNECTION_S, ttl_dns_cache=60
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @contextlib.asynccontextmanager
    async def open(self, replica: fleet.Replica, call: Call) -> AsyncIterator["Answer"]:
        """Send ``call`` and yield its answer; leaving early cancels it there.

        Raises:
            Full: the replica has no seat.
            Lost: it is gone, or was during the answer.
            errors.ForebayError: the engine refuses the request itself; nothing was computed.
        """
        if self._session is None:
            raise errors.Internal("replica client used outside its context")
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._options.connect_timeout_s, sock_read=call.silence_s
        )
        headers = {**self._headers(replica, call), "Content-Type": "application/json"}
        url = f"http://{replica.address}{call.path}"
        try:
            response = await self._session.post(
                url, data=call.body, headers=headers, timeout=timeout, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Lost(f"not reachable: {error}", computed=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"no answer: {_words(error)}", computed=True) from error
        answer = Answer(response)
        try:
            await self._check(replica, response)
            yield answer
        finally:
            await answer.leave()

    def _headers(self, replica: fleet.Replica, call: Call) -> dict[str, str]:
        # Not dataclasses.asdict: it copies deeply, at a tenth of the cost of the whole request.
        fields = {name: getattr(call.identity, name) for name in _IDENTITY}
        identity = json.dumps(fields, separators=(",", ":"))
        return {
            "Authorization": f"Bearer {self._secret(replica)}",
            "X-Request-Id": f"{call.identity.request_id}.{call.identity.attempt}",
            "X-Forebay-Identity": urllib.parse.quote(identity, safe=_JSON_SAFE),
            "Accept": frames.MEDIA_TYPE,
            "Accept-Encoding": "identity",
        }

    def _secret(self, replica: fleet.Replica) -> str:
        key = (replica.replica_id, replica.incarnation)
        if key not in self._secrets:
            try:
                text = Path(replica.secret_file).read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise Lost(f"secret of {replica.replica_id}: {error}", computed=False) from error
            self._secrets = {k: v for k, v in self._secrets.items() if k[0] != key[0]}
            self._secrets[key] = text
        return self._secrets[key]

    async def _check(self, replica: fleet.Replica, response: aiohttp.ClientResponse) -> None:
        """Raise unless the answer consists of frames."""
        status = response.status
        if status == 200 and response.content_type == frames.MEDIA_TYPE:
            return
        if status == 200:
            raise Lost(f"answered {response.content_type}, not frames", computed=True)
        try:
            raw = await response.content.read(_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"broke off its error: {_words(error)}", computed=False) from error
        if status == 429:
            raise Full
        if status in (401, 403):
            # The secret belongs to another incarnation, which the next view will tell.
            self._secrets.pop((replica.replica_id, replica.incarnation), None)
            raise Lost("refused our secret", computed=False)
        if status >= 500 or status < 400:
            # It answers, so it lives: what made it fail may be this request, and others go on there.
            raise Lost(f"answered {status}", computed=False, kind=errors.EngineFailed)
        raise engine_error(status, raw)


class Answer:
    """The frames of one answer."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._decoder = frames.Decoder()
        self.whole = False  # the last frame was seen

    async def some(self) -> Sequence[frames.Frame]:
        """Return the frames that have come since, at least one; END or ERROR is the last of all.

        Raises:
            Lost: the stream broke off, was silent for too long, or is no sequence of frames.
        """
        ready: list[frames.Frame] = []
        try:
            while not ready:
                chunk = await self._response.content.readany()
                if not chunk:
                    raise Lost("ended without its last frame", computed=True)
                ready.extend(self._decoder.feed(chunk))
        except (aiohttp.ClientError, TimeoutError, OSError, frames.FrameError) as error:
            raise Lost(f"broke off: {_words(error)}", computed=True) from error
        self.whole = ready[-1].kind in (frames.Kind.END, frames.Kind.ERROR)
        return ready

    async def leave(self) -> None:
        """Give the connection back if the answer was read whole, else close it.

        A closed connection is how the replica hears that nobody listens any more.
        """
        if self.whole:
            # The end of the chunked body follows the last frame at once; give up soon.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with asyncio.timeout(_FINISH_S):
                    while not self._response.content.at_eof():
                        await self._response.content.readany()
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


def engine_error(status: int, raw: bytes) -> errors.ForebayError:
    """Turn an engine's own refusal into the error that the caller sees."""
    message: Any = None
    param: Any = None
    with contextlib.suppress(ValueError, AttributeError):
        parsed = json.loads(raw)
        fields = parsed.get("error") if isinstance(parsed.get("error"), Mapping) else parsed
        message, param = fields.get("message"), fields.get("param")
    text = " ".join(str(message or f"the engine refused the request ({status})").split())
    text = text[:_MESSAGE_CHARS]
    name = str(param)[:100] if param else None
    lowered = text.lower()
    if "context length" in lowered or "maximum context" in lowered or "context_length" in lowered:
        return errors.ContextTooLong(text, param=name)
    if status == 404:
        return errors.ModelNotFound(text, param=name)
    if status == 413:
        return errors.BodyTooLarge(text, param=name)
    return errors.BadRequest(text, param=name)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
