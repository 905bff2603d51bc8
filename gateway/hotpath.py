"""A request for inference from its head to its answer: who asks, what for, and the request path.

What FastAPI does for every other route is done here by hand, in one task and with few awaits.
"""

from typing import Any

from gateway import assembly, checks, error_map, exchange, heads, line_outlet, resolve
from scheduler.contracts import frames, ids, requests

ENDPOINTS = {endpoint.value.encode(): endpoint for endpoint in requests.Endpoint}
_WISHES = (
    *("priority", "deadline-ms", "cache-hint", "version", "adapter"),
    *("team", "user", "batch-job", "custom-id", "preempted", "lost"),
)
_NAMES = ("x-request-id", "traceparent", *(f"x-forebay-{wish}" for wish in _WISHES))
_HEARD = {name.encode(): name for name in _NAMES}


class HotPath:
    """Answers the inference routes of one gateway worker.

    Args:
        gateway: the running parts.

    Attributes:
        limits: the [gateway] table, for the bounds of connections.
        doors: how many connections there are.
    """

    def __init__(self, gateway: assembly.Gateway) -> None:
        self._gateway = gateway
        self._path = gateway.path
        self._authenticator = gateway.deps.authenticator
        self._clock = gateway.deps.clock
        self._limit = gateway.deps.settings.body_limit
        self._bodies = gateway.bodies
        self._apart = gateway.apart
        self._extra = gateway.deps.settings.extra_fields
        self.limits = gateway.deps.settings
        self.doors = heads.Doors(self.limits)

    async def serve(self, asked: exchange.Exchange) -> None:
        """Answer one request; cancelled when its client leaves."""
        try:
            request = await self._checked(asked)
        except Exception as error:
            known, request_id = error_map.known(error), ids.uuid7()
            self._path.turned_away(known, request_id, asked.endpoint.value)
            asked.refuse(known, request_id)
            return
        outlet: exchange.Stream | exchange.Whole | line_outlet.Line = asked.outlet(request)
        if request.batch is not None and asked.header(b"accept") == frames.MEDIA_TYPE:
            outlet = line_outlet.Line(asked, request.request_id)
        try:
            await self._path.answer(request, outlet)
        except Exception as error:
            outlet.fail(error_map.known(error))
        else:
            outlet.finish()

    async def _checked(self, asked: exchange.Exchange) -> requests.InferenceRequest:
        """Return the request that ``asked`` is.

        Raises:
            errors.ForebayError: it is none that could be served.
        """
        credential = await self._authenticator.authenticate(asked.header(b"authorization"))
        raw = await asked.read(self._limit, self._bodies)
        arrived_us = self._clock.wall_us()
        body = await self._apart.do(len(raw), lambda: self._judged(asked.endpoint, raw))
        headers = {
            _HEARD[name]: value.decode("latin-1")
            for name, value in reversed(asked.headers)
            if name in _HEARD
        }
        caller = credential
        batch: requests.BatchRef | None = None
        if credential.service:
            caller = resolve.acting_for(credential, headers)
            batch = resolve.batch_ref(credential, headers)
        source = resolve.Source(
            asked.endpoint,
            body,
            caller,
            resolve.wishes(headers, body),
            arrived_us,
            batch,
            raw,
        )
        return resolve.request(source, self._gateway.room.view(), ids.RequestId(ids.uuid7()))

    def _judged(self, endpoint: requests.Endpoint, raw: bytes) -> dict[str, Any]:
        body = checks.parse(raw)
        checks.check(endpoint, body, self._extra)
        return body
