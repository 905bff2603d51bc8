"""Forwards requests to an external OpenAI-compatible server and says when it breaks off."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable

import aiohttp
from starlette import types

from engines.http import upstream
from engines.replica import answers, engine, steptime
from scheduler.contracts import clock, requests

FAILURES_TO_DOWN = 3  # probes in a row
CONNECT_S = 5.0
_PATHS = frozenset(endpoint.value for endpoint in requests.Endpoint)
_log = logging.getLogger(__name__)


class Proxy:
    """`engines.replica.engine.Engine` in front of an external server.

    Args:
        options: the server.
        session: the client; it must not use proxies from the environment.
        time: the clock.
    """

    def __init__(
        self, options: upstream.Options, session: aiohttp.ClientSession, time: clock.Clock
    ) -> None:
        self._options = options
        self._session = session
        self._clock = time
        self._taps = engine.Taps(time.wall_us)
        self._open: dict[str, aiohttp.ClientResponse] = {}
        self._failure = ""
        self._output_tokens = 0

    @property
    def app(self) -> types.ASGIApp:
        """The ASGI app that forwards."""
        return self._serve

    @property
    def adapters(self) -> None:
        """None: what another server has loaded is its own affair."""
        return None

    @property
    def sleeper(self) -> None:
        """None: whether another server sleeps is its own affair."""
        return None

    def tap(self, request_id: str) -> engine.Tap:
        """Open a request's tap."""
        return self._taps.open(request_id)

    def untap(self, request_id: str) -> None:
        """Close it, and add its count to the total."""
        tap = self._taps.find(request_id)
        if tap is not None:
            self._output_tokens += tap.output_tokens
        self._taps.close(request_id)

    async def abort(self, request_id: str) -> None:
        """Close the connection upstream: the only abort that every server understands."""
        response = self._open.pop(request_id, None)
        if response is not None:
            response.close()

    def observe(self, observer: Callable[[steptime.Step], None]) -> None:
        """Never call ``observer``: an external server tells no steps."""

    def stats(self) -> engine.EngineStats:
        """Return whether it answers; it tells nothing of its KV cache."""
        return engine.EngineStats(output_tokens_total=self._output_tokens, failure=self._failure)

    async def probe(self) -> bool:
        """Ask the server whether it lives."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            for path in ("/health", "/v1/models"):
                url = self._options.base_url + path
                limit = aiohttp.ClientTimeout(total=CONNECT_S)
                async with self._session.get(url, timeout=limit) as response:
                    if response.status < 400:
                        return True
        return False

    async def watch(self) -> None:
        """Probe for ever; a few failures in a row mark the replica as failed, one success clears it."""
        failures = 0
        while True:
            failures = 0 if await self.probe() else failures + 1
            down = failures >= FAILURES_TO_DOWN
            self._failure = f"{self._options.base_url} does not answer" if down else ""
            await self._clock.sleep(self._options.probe_s)

    async def _serve(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["path"] in _PATHS and scope["method"] == "POST":
            await self._forward(scope, receive, send)
        else:
            await answers.send_error(send, 404, "not_found", f"no such path {scope['path']}")

    async def _forward(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        headers = dict(scope["headers"])
        key = headers.get(b"x-request-id", b"").decode("latin-1")
        tap = self._taps.find(key)
        prepared = upstream.prepare(
            await answers.read_body(receive), self._options.model, scope["path"]
        )
        url = self._options.base_url + upstream.PATHS.get(scope["path"], scope["path"])
        sent = {"content-type": "application/json", "x-request-id": key}
        try:
            async with self._session.post(url, data=prepared.body, headers=sent) as response:
                self._open[key] = response
                watch = upstream.Watch(tap, strip_usage=prepared.strip_usage)
                await self._relay(response, watch, send, prepared.body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{self._options.base_url} broke off: {type(error).__name__}: {error}"
            if tap is None:
                raise
            tap.failed(reason)
        finally:
            self._open.pop(key, None)

    @staticmethod
    async def _relay(
        response: aiohttp.ClientResponse, watch: upstream.Watch, send: types.Send, asked: bytes
    ) -> None:
        kind = response.headers.get("content-type", "application/json")
        start = {"type": "http.response.start", "status": response.status}
        start_headers = [(b"content-type", kind.encode("latin-1"))]
        if response.status >= 300 or not kind.startswith("text/event-stream"):
            body = await response.read()
            if response.status < 300:
                with contextlib.suppress(ValueError):
                    watch.whole(asked, json.loads(body))
            await send({**start, "headers": start_headers})
            await send({"type": "http.response.body", "body": body})
            return
        await send({**start, "headers": start_headers})
        try:
            async for chunk in response.content.iter_any():
                events = watch.events(chunk)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        finally:  # one that breaks off has no usage either, and its prompt was read
            watch.estimate(asked)
        await send({"type": "http.response.body", "body": b""})


async def _lifespan(receive: types.Receive, send: types.Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


@contextlib.asynccontextmanager
async def opened(options: upstream.Options, time: clock.Clock) -> AsyncIterator[Proxy]:
    """Open the proxy once the server answers.

    Raises:
        ConnectionError: it does not.
    """
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=options.idle_s)
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=limits,
        trust_env=False,  # the cluster's http_proxy must not swallow internal calls
        auto_decompress=True,
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=2**16,
    ) as session:
        proxy = Proxy(options, session, time)
        if not await proxy.probe():
            raise ConnectionError(f"{options.base_url} does not answer /health or /v1/models")
        watcher = asyncio.create_task(proxy.watch())
        try:
            yield proxy
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
