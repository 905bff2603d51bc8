"""One attempt's life in a replica: seat, engine, answer, row.

Whatever happens (a whole answer, an engine that dies, a client that leaves, a batch sequence that gives
its seat away, a server that stops), the seat is given back and exactly one row says what was computed.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import urllib.parse
from typing import Any

from starlette import types

from engines.replica import answers, engine, gate, response, rows
from scheduler.contracts import clock, errors, fleet, frames, requests, usage

CANCEL_S = 5.0  # for an engine app that does not end when cancelled; then it is left behind
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How the engine's part of an attempt ended: the outcome, and the error to tell, if any."""

    outcome: usage.Outcome
    error: frames.Error | None = None
    reason: str = ""


_BY_CODE = {
    errors.Preempted.code: usage.Outcome.PREEMPTED,
    errors.Cancelled.code: usage.Outcome.CANCELLED,
    errors.ReplicaLost.code: usage.Outcome.REPLICA_LOST,
}


class Attempts:
    """The ASGI app of the inference paths.

    Args:
        inner: the engine.
        door: seats and who sits on them.
        ledger: where the rows go.
        time: the clock.
        stranger: the identity of a request that brings none (an admin's curl).
    """

    def __init__(
        self,
        inner: engine.Engine,
        door: gate.Gate,
        ledger: rows.Ledger,
        time: clock.Clock,
        stranger: usage.Identity,
    ) -> None:
        self._engine = inner
        self._gate = door
        self._ledger = ledger
        self._clock = time
        self._stranger = stranger

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Serve one inference request."""
        try:
            identity = self._identify(scope)
            self._ledger.ready()
            body = await answers.read_body(receive)
            key = f"{identity.request_id}.{identity.attempt}"
            seat = await self._gate.enter(key, requests.Tier(identity.tier), sequences(body))
        except answers.ClientGone:
            return
        except gate.Full as full:
            await send_full(send, str(full), self.stats())
            return
        except ValueError as error:
            await answers.send_error(send, 400, errors.BadRequest.code, f"replica: {error}")
            return
        except errors.ForebayError as error:
            await answers.send_json(send, error.status, error.openai())
            return
        with seat:
            await self._serve(_Call(scope, receive, send, body), seat, identity)

    def stats(self) -> fleet.ReplicaStats:
        """Return the replica's stats as of now."""
        table, inner = self._gate.table, self._engine.stats()
        return fleet.ReplicaStats(
            at_us=self._clock.wall_us(),
            seats=table.total,
            interactive=table.interactive,
            batch=table.batch,
            kv_blocks=inner.kv_blocks,
            kv_free=inner.kv_free,
            output_tokens_total=inner.output_tokens_total,
            preempted_total=table.preempted_total,
            reclaim_ms=tuple(self._gate.reclaim_ms),
            step_ms=inner.step_ms,
        )

    def _identify(self, scope: types.Scope) -> usage.Identity:
        headers = dict(scope["headers"])
        raw = headers.get(b"x-forebay-identity")
        if raw is not None:
            try:
                fields = json.loads(urllib.parse.unquote(raw.decode("ascii")))
                identity = usage.Identity(**fields)
                requests.Tier(identity.tier)
            except (TypeError, UnicodeDecodeError) as error:
                raise ValueError(f"X-Forebay-Identity: {error}") from error
            return identity
        return dataclasses.replace(
            self._stranger,
            request_id=rows.new_request_id(),
            endpoint=scope["path"],
            arrived_us=self._clock.wall_us(),
            started_us=self._clock.wall_us(),
        )

    async def _serve(self, call: "_Call", seat: gate.Seat, identity: usage.Identity) -> None:
        tap = self._engine.tap(seat.key)
        tap.band = requests.Tier(identity.tier).band
        reply = response.Response(call.send, tap, framed=call.wants_frames, request=call.body)
        ended = Ended(usage.Outcome.ERROR, reason="the server stopped")
        try:
            ended = await self._run(call, seat, reply)
        finally:
            self._engine.untap(seat.key)
            seat.release()
            self._ledger.close(identity, tap, ended.outcome, ended.reason)
        if ended.outcome is not usage.Outcome.CLIENT_GONE:
            await reply.close(ended.error)

    async def _run(self, call: "_Call", seat: gate.Seat, reply: response.Response) -> Ended:
        """Drive the engine's app until it is done or must stop; it has let go when this returns."""
        left = asyncio.Event()
        inner_scope = with_request_id(call.scope, seat.key)
        inner = asyncio.create_task(
            _call(self._engine.app, inner_scope, replay(call.body, left), reply.take)
        )
        gone = asyncio.create_task(_disconnected(call.receive))
        ordered_out = asyncio.create_task(seat.must_leave.wait())
        try:
            await asyncio.wait({inner, gone, ordered_out}, return_when=asyncio.FIRST_COMPLETED)
            if inner.done():
                return self._judge(inner, reply)
        finally:
            if not inner.done():
                reply.mute()
                await self._stop(inner, seat.key, left)
            for watcher in (gone, ordered_out):
                watcher.cancel()
        return self._interrupted(seat, reply)

    def _judge(self, inner: "asyncio.Task[None]", reply: response.Response) -> Ended:
        crash = inner.exception()
        if crash is not None:
            _log.error("engine app failed", exc_info=crash)
        if reply.refused:
            outcome = usage.Outcome.REFUSED if reply.status < 500 else usage.Outcome.ERROR
            return Ended(outcome, reason=f"the engine answered {reply.status}")
        error = reply.verdict(crash)
        if error is None:
            return Ended(usage.Outcome.OK)
        return Ended(_BY_CODE.get(error.code, usage.Outcome.ERROR), error, error.message)

    def _interrupted(self, seat: gate.Seat, reply: response.Response) -> Ended:
        if seat.why is gate.Leave.PREEMPTED:
            error = reply.counted(
                errors.Preempted.code,
                "batch sequence gave its seat to interactive work",
                errors.Preempted.status,
            )
        elif seat.why is gate.Leave.CANCELLED:
            error = reply.counted(
                errors.Cancelled.code, "cancelled on request", errors.Cancelled.status
            )
        else:
            return Ended(usage.Outcome.CLIENT_GONE, reason="the gateway's connection closed")
        return Ended(_BY_CODE[error.code], error, error.message)

    async def _stop(self, inner: "asyncio.Task[None]", key: str, left: asyncio.Event) -> None:
        """Make the engine let go of the sequence, then its app return."""
        left.set()
        try:
            await self._engine.abort(key)
        except Exception:
            _log.exception("abort of %s failed; its app is cancelled instead", key)
        inner.cancel()
        await asyncio.wait({inner}, timeout=CANCEL_S)
        if inner.done() and not inner.cancelled():
            inner.exception()  # retrieved: what a muted app raised is of no interest


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One ASGI call whose body has been read."""

    scope: types.Scope
    receive: types.Receive
    send: types.Send
    body: bytes

    @property
    def wants_frames(self) -> bool:
        wanted = frames.MEDIA_TYPE.encode()
        return any(k == b"accept" and wanted in v for k, v in self.scope["headers"])


async def _call(
    served: types.ASGIApp, scope: types.Scope, receive: types.Receive, send: types.Send
) -> None:
    await served(scope, receive, send)


def with_request_id(scope: types.Scope, key: str) -> types.Scope:
    """Return the scope that the engine's app sees: our request id, and none of our own headers."""
    hidden = {b"x-request-id", b"authorization", b"x-forebay-identity", b"accept"}
    headers = [(k, v) for k, v in scope["headers"] if k not in hidden]
    return {**scope, "headers": [*headers, (b"x-request-id", key.encode())]}


def replay(body: bytes, left: asyncio.Event) -> types.Receive:
    """Return a `receive` that gives ``body`` once and the disconnect when ``left`` is set."""
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> types.Message:
        if pending:
            return pending.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


async def _disconnected(receive: types.Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


def sequences(body: bytes) -> int:
    """Return how many sequences a request body asks to run at once: choices times prompts; 1 if unclear."""
    try:
        value = json.loads(body)
    except ValueError:
        return 1  # the engine will refuse it, in its own words
    if not isinstance(value, dict):
        return 1
    choices = value.get("n")
    prompts = value.get("prompt")
    many = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)
    count = len(prompts) if many and isinstance(prompts, list) else 1
    whole = isinstance(choices, int) and not isinstance(choices, bool) and choices > 0
    return count * (choices if whole and isinstance(choices, int) else 1)


async def send_full(send: types.Send, reason: str, stats: fleet.ReplicaStats) -> None:
    """Say that there is no seat, with fresh stats."""
    await answers.send_error(
        send, 429, "replica_full", f"replica full: {reason}", stats=dataclasses.asdict(stats)
    )
