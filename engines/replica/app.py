"""Puts the stack before an engine's app: secret, then control paths, then seats and rows."""

import dataclasses

from starlette import types

from engines.replica import (
    adapters,
    answers,
    attempt,
    engine,
    gate,
    rows,
    seats,
    secret,
    spans,
    state,
    throttle,
    trunk,
)
from scheduler.contracts import clock, fleet, requests, tracing, trunks, usage

_INFERENCE = frozenset(endpoint.value for endpoint in requests.Endpoint)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a replica is set up.

    Attributes:
        secret: the bearer secret of every path.
        role: what it takes at first.
        seats: sequences that run at once.
        reserved_seats: of these, never taken by batch while the role is shared.
        about: which replica it is.
        limits: what batch must leave to interactive work.
    """

    secret: str
    role: fleet.Role
    seats: int
    reserved_seats: int
    about: state.About
    limits: throttle.Limits = dataclasses.field(default_factory=throttle.Limits)


def build(
    inner: engine.Engine,
    options: Options,
    *,
    sink: usage.UsageSink,
    time: clock.Clock,
    tracer: tracing.Tracer | None = None,
) -> "Replica":
    """Return the replica: the engine's ASGI app with Forebay's stack before it.

    Args:
        inner: the engine.
        options: how this replica is set up.
        sink: where its usage rows go.
        time: the clock.
        tracer: where its spans go; nowhere if not given.
    """
    table = seats.Seats(options.seats, options.reserved_seats, options.role)
    door = gate.Gate(table, time, options.limits)
    inner.observe(door.step)
    ledger = rows.Ledger(sink, time)
    lines = trunk.Trunks()
    loras = adapters.Adapters(inner.adapters, time)
    attempts = attempt.Attempts(inner, door, ledger, time, _stranger(options.about), lines, loras)
    control = state.Control(inner, door, attempts, options.about, loras)
    stack: types.ASGIApp = _Stack(inner, control, attempts, ledger, lines)
    if tracer is not None:
        about = options.about
        named = {"forebay.replica": about.replica_id, "forebay.model": about.model}
        stack = spans.Spans(stack, tracer, named)
    return Replica(secret.SecretCheck(stack, options.secret), door, lines, loras)


class Replica:
    """A replica as an ASGI app."""

    def __init__(
        self,
        served: types.ASGIApp,
        door: gate.Gate,
        lines: trunk.Trunks,
        loras: adapters.Adapters,
    ) -> None:
        self._adapters = loras
        self._served = served
        self._gate = door
        self._trunks = lines

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Serve one ASGI scope."""
        await self._served(scope, receive, send)

    async def retire(self) -> None:
        """Abort batch, take nothing new, and return once every running request has ended.

        This is what SIGTERM means: Slurm sends it to every process of a step, and a stream must not be
        cut for it while there is grace time; whoever has less patience sends SIGKILL.
        """
        self._gate.table.draining = True
        await self._gate.set_role(fleet.Role.INTERACTIVE)
        await self._gate.until_empty()

    def end(self) -> None:
        """End what would go on for ever: the server stops."""
        self._trunks.end()
        self._adapters.end()


class _Stack:
    """Sends each request to the part that answers it; what is nobody's goes to the engine's app."""

    def __init__(
        self,
        inner: engine.Engine,
        control: state.Control,
        attempts: attempt.Attempts,
        ledger: rows.Ledger,
        lines: trunk.Trunks,
    ) -> None:
        self._engine = inner
        self._control = control
        self._attempts = attempts
        self._ledger = ledger
        self._trunks = lines

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        if scope["type"] == "lifespan":
            await self._engine.app(scope, receive, self._flushing(send))
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
        elif scope["path"] == trunks.PATH and scope["method"] == "POST":
            await self._trunks(scope, receive, send)
        elif self._control.handles(scope["path"]):
            await self._control(scope, receive, send)
        elif scope["path"] in _INFERENCE and scope["method"] == "POST":
            await self._attempts(scope, receive, send)
        elif scope["method"] in {"GET", "HEAD"}:
            await self._engine.app(scope, receive, send)
        else:
            # Other POST paths of an engine would compute without a seat and without a row.
            await _refuse(scope, send)

    def _flushing(self, send: types.Send) -> types.Send:
        async def flushing(message: types.Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self._ledger.flush()
            await send(message)

        return flushing


async def _refuse(scope: types.Scope, send: types.Send) -> None:
    await answers.send_error(
        send, 404, "not_found", f"replica: no such path {scope['method']} {scope['path']}"
    )


def _stranger(about: state.About) -> usage.Identity:
    """Return the identity under which a request without one is served, at the platform's cost."""
    return usage.Identity(
        request_id="",
        attempt=1,
        cluster=about.cluster,
        team="forebay",
        user="admin",
        key_id="replica-secret",
        model=about.model,
        version=about.version,
        adapter="",
        endpoint="",
        tier=requests.Tier.INTERACTIVE.value,
        replica_id=about.replica_id,
        lease_id=about.lease_id,
        slurm_job_id=about.slurm_job_id,
        arrived_us=0,
        started_us=0,
    )
