"""A replica's control paths: state, role, adapters, abort, drain, sleep, health."""

import asyncio
import dataclasses
import json
from typing import Any

from starlette import types

from engines.replica import adapters, answers, attempt, engine, gate
from scheduler.contracts import errors, fleet

SETTLE_S = 2.0  # that an order of adapters waits for what comes of it


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
        self,
        inner: engine.Engine,
        door: gate.Gate,
        attempts: attempt.Attempts,
        about: About,
        loras: adapters.Adapters,
    ) -> None:
        self._adapters = loras
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
            elif route == ("POST", "/forebay/adapters"):
                await answers.send_json(send, 200, await self._load(await _fields(receive)))
            elif route == ("POST", "/forebay/abort"):
                await answers.send_json(send, 200, self._abort(await _fields(receive)))
            elif route == ("POST", "/forebay/drain"):
                self._gate.table.draining = True
                await answers.send_json(send, 200, self.state())
            elif route == ("POST", "/forebay/evict"):
                self._gate.table.draining = True
                await answers.send_json(send, 200, {"evicted": await self._gate.evict()})
            elif route == ("POST", "/forebay/sleep"):
                await answers.send_json(send, 200, await self._sleep())
            elif route == ("POST", "/forebay/wake"):
                await answers.send_json(send, 200, await self._wake(await _fields(receive)))
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
            "adapters": self._adapters.report(),
            "adapter_room": self._adapters.room,
            "sleeps": self._engine.sleeper is not None,
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

    async def _load(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Follow which adapters are wanted; answers once they are there, or after `SETTLE_S`."""
        wanted = fields.get("wanted")
        if not isinstance(wanted, list):
            raise ValueError("wanted: must be a list of name and path")  # noqa: TRY004 - told as 400
        self._adapters.want([(str(name), str(path)) for name, path in wanted])
        await self._adapters.settled(SETTLE_S)
        return {"adapters": self._adapters.report()}

    async def _sleep(self) -> dict[str, Any]:
        """Give the GPUs' memory back; says what came of it, and why it failed."""
        sleeper, table = self._engine.sleeper, self._gate.table
        if sleeper is None:
            raise ValueError("this engine does not sleep: end its process")
        if not table.draining or len(table):
            raise ValueError("it must be drained before it sleeps")
        try:
            slept = await sleeper.sleep()
        except engine.SleepError as error:
            return {"failed": str(error)}
        return {"failed": "", **dataclasses.asdict(slept)}

    async def _wake(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Serve again, in this role and as this incarnation; says why it can't."""
        sleeper = self._engine.sleeper
        if sleeper is None:
            raise ValueError("this engine does not sleep")
        role, incarnation = fleet.Role(str(fields.get("role"))), int(str(fields.get("incarnation")))
        try:
            await sleeper.wake()
        except engine.SleepError as error:
            return {"failed": str(error)}
        self._about = dataclasses.replace(self._about, incarnation=incarnation)
        async with self._role_order:
            await self._gate.set_role(role)
        self._gate.table.draining = False
        return {"failed": ""}

    def _abort(self, fields: dict[str, Any]) -> dict[str, Any]:
        key = f"{fields.get('request_id')}.{fields.get('attempt')}"
        return {"aborted": self._gate.cancel(key)}


async def _fields(receive: types.Receive) -> dict[str, Any]:
    value = json.loads(await answers.read_body(receive))
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")  # noqa: TRY004 - told as 400
    return value
