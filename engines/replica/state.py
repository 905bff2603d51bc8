"""A replica's control paths: state, role, abort, drain, health."""

import asyncio
import dataclasses
import json
from typing import Any

from starlette import types

from engines.replica import answers, attempt, engine, gate
from scheduler.contracts import errors, fleet


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """Which replica this is, for its own words about itself."""

    replica_id: str
    cluster: str = ""
    lease_id: str = ""
    slurm_job_id: str = ""
    model: str = ""
    version: str = ""
    incarnation: int = 1


class Control:
    """The ASGI app of ``/forebay/*`` and ``/health``."""

    def __init__(
        self, inner: engine.Engine, door: gate.Gate, attempts: attempt.Attempts, about: About
    ) -> None:
        self._engine = inner
        self._gate = door
        self._attempts = attempts
        self._about = about
        self._role_order = asyncio.Lock()

    def handles(self, path: str) -> bool:
        """Whether ``path`` is one of its own."""
        return path == "/health" or path.startswith("/forebay/")

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Answer one control request."""
        route = (scope["method"], scope["path"])
        try:
            if route == ("GET", "/health"):
                await self._health(send)
            elif route == ("GET", "/forebay/state"):
                await answers.send_json(send, 200, self.state())
            elif route == ("POST", "/forebay/role"):
                await answers.send_json(send, 200, await self._role(await _fields(receive)))
            elif route == ("POST", "/forebay/abort"):
                await answers.send_json(send, 200, self._abort(await _fields(receive)))
            elif route == ("POST", "/forebay/drain"):
                self._gate.table.draining = True
                await answers.send_json(send, 200, self.state())
            elif route == ("POST", "/forebay/evict"):
                self._gate.table.draining = True
                await answers.send_json(send, 200, {"evicted": await self._gate.evict()})
            else:
                await answers.send_error(
                    send, 404, errors.NotFound.code, f"replica: no such path {scope['path']}"
                )
        except answers.ClientGone:
            return
        except ValueError as error:
            await answers.send_error(send, 400, errors.BadRequest.code, f"replica: {error}")

    def state(self) -> dict[str, Any]:
        """Return stats, role, health and name in one mapping."""
        inner = self._engine.stats()
        return {
            **dataclasses.asdict(self._about),
            "role": self._gate.table.role.value,
            "draining": self._gate.table.draining,
            "running": len(self._gate.table),
            "steps_total": inner.steps_total,
            "kv_preemptions": inner.kv_preemptions,
            "left_at_step": self._attempts.left_at_step,
            "failure": inner.failure,
            "work": dataclasses.asdict(inner.work) if inner.work is not None else None,
            "stats": dataclasses.asdict(self._attempts.stats()),
        }

    async def _health(self, send: types.Send) -> None:
        failure = self._engine.stats().failure
        if failure:
            await answers.send_error(send, 503, errors.ReplicaLost.code, f"engine: {failure}")
        else:
            await answers.send_json(send, 200, {"status": "ok"})

    async def _role(self, fields: dict[str, Any]) -> dict[str, Any]:
        role = fleet.Role(str(fields.get("role")))
        async with self._role_order:
            aborted = await self._gate.set_role(role)
        return {"role": role.value, "aborted": aborted}

    def _abort(self, fields: dict[str, Any]) -> dict[str, Any]:
        key = f"{fields.get('request_id')}.{fields.get('attempt')}"
        return {"aborted": self._gate.cancel(key)}


async def _fields(receive: types.Receive) -> dict[str, Any]:
    value = json.loads(await answers.read_body(receive))
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")  # noqa: TRY004 - told as 400
    return value
