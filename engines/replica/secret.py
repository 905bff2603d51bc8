"""The bearer secret of a replica: no path answers without it, whatever the engine's app would do."""

import hmac

from starlette import types

from engines.replica import answers


class SecretCheck:
    """ASGI middleware that lets a request pass only with ``Authorization: Bearer <secret>``."""

    def __init__(self, app: types.ASGIApp, secret: str) -> None:
        if not secret:
            raise ValueError("a replica's secret must not be empty")
        self._app = app
        self._expected = b"Bearer " + secret.encode()

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Pass lifespan and permitted HTTP on; answer 401 otherwise; close WebSockets."""
        if scope["type"] == "lifespan" or self._permits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answers.send_error(
                send, 401, "invalid_api_key", "replica: the bearer secret is missing or wrong"
            )

    def _permits(self, scope: types.Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
