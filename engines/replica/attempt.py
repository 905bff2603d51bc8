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

from engines.replica import adapters, answers, asked, engine, gate, response, rows, tempo, trunk
from scheduler.contracts import clock, errors, fleet, frames, requests, stored, trunks, usage

_BYTES_A_TOKEN = 4  # of English text in the usual tokenizers; nothing here has tokenized it yet
CANCEL_S = 5.0  # for an engine app that does not end when cancelled; then it is left behind
_MOST_TOKENS = b"x-forebay-most-tokens"  # bound of an answer whose body names none
_PREEMPTED = b"x-forebay-preempted"  # how often the batch line gave its seat back before
_POOLED = frozenset(each.value for each in requests.Endpoint if each.pooled)
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
    errors.EngineFailed.code: usage.Outcome.REPLICA_LOST,
    errors.Draining.code: usage.Outcome.REPLICA_LOST,
}
_DEAD = {
    errors.EngineFailed.code: errors.ReplicaLost.code
}  # an engine that is dead blames no request
_ORDERED_OUT: dict[gate.Leave, tuple[type[errors.ForebayError], str]] = {
    gate.Leave.PREEMPTED: (
        errors.Preempted,
        "batch sequence gave its seat to interactive work",
    ),
    gate.Leave.CANCELLED: (errors.Cancelled, "cancelled on request"),
    gate.Leave.DRAINING: (errors.Draining, "the replica leaves and its time to drain is up"),
}


class Attempts:
    """The ASGI app of the inference paths.

    Args:
        inner: the engine.
        door: seats and who sits on them.
        ledger: where the rows go.
        time: the clock.
        stranger: the identity of a request that brings none (an admin's curl).
        lines: the trunks of the gateways.
        loras: the adapters that requests run on.
    """

    def __init__(
        self,
        inner: engine.Engine,
        door: gate.Gate,
        ledger: rows.Ledger,
        time: clock.Clock,
        stranger: usage.Identity,
        lines: trunk.Trunks | None = None,
        loras: adapters.Adapters | None = None,
    ) -> None:
        self._adapters = loras or adapters.Adapters(None, time)
        self._trunks = lines or trunk.Trunks()
        self._engine = inner
        self._gate = door
        self._ledger = ledger
        self._clock = time
        self._tempo = tempo.Tempo(time)
        self._stranger = stranger
        self._inside: set[str] = set()  # request ids
        self.left_at_step = (
            0  # engine steps when a request was last made to leave, for tests of that
        )

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Serve one inference request."""
        try:
            identity = self._identify(scope)
            self._ledger.ready()
            body = asked.read(await answers.read_body(receive))
            if identity.request_id in self._inside:
                raise gate.Full("an earlier attempt of the request is still leaving")
            self._inside.add(identity.request_id)
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
        try:
            await self._seated(_Call(scope, receive, send, body), identity)
        finally:
            self._inside.discard(identity.request_id)

    async def _seated(self, call: "_Call", identity: usage.Identity) -> None:
        key = f"{identity.request_id}.{identity.attempt}"
        tier = requests.Tier(identity.tier)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._adapters.using(identity.adapter))
                tokens = len(call.asked.body) // _BYTES_A_TOKEN
                seat = await self._gate.enter(
                    key,
                    tier,
                    call.asked.sequences,
                    prompt_tokens=tokens,
                    preempted=_number(call.scope, _PREEMPTED),
                )
            except gate.NoAdapter as missing:
                await answers.send_error(call.send, 429, frames.NO_ADAPTER, f"replica: {missing}")
                return
            except gate.Full as full:
                await send_full(call.send, str(full), self.stats())
                return
            with seat:
                await self._serve(call, seat, identity)

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
            kv_block_tokens=inner.kv_block_tokens,
            queued=inner.queued,
            ttft_ms=self._tempo.ttft_ms(),
            tokens_per_s=self._tempo.tokens_per_s(inner.output_tokens_total),
            batch_room=self._gate.batch_room(),
        )

    def _identify(self, scope: types.Scope) -> usage.Identity:
        headers = dict(scope["headers"])
        raw = headers.get(b"x-forebay-identity")
        if raw is not None:
            try:
                fields = json.loads(urllib.parse.unquote(raw.decode("ascii")))
                identity = stored.read(usage.Identity, fields)
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
        # Every attempt has the request's id in the engine, and so in the answer that the client sees.
        tap = self._engine.tap(identity.request_id)
        tap.band = requests.Tier(identity.tier).band
        tap.begun, tap.why_not = call.asked.begun, call.asked.why_not
        tap.single = call.asked.sequences == 1
        tap.most_tokens = _number(call.scope, _MOST_TOKENS)
        stream = self._trunks.of(call.scope) if call.wants_frames else None
        reply = response.Response(
            call.send if stream is None else stream.through(call.send),
            tap,
            framed=call.wants_frames,
            request=call.asked.body,
            streams=lambda: len(self._gate.table),
            path=call.scope["path"],
            told=identity.tier == requests.Tier.BATCH,
        )
        tap.on_first.append(lambda: self._gate.throttle.prefilled(seat.key))
        unguarded = call.scope["path"] in _POOLED or not self._engine.stats().steps_total
        if identity.tier != requests.Tier.BATCH and unguarded:
            # What samples nothing is a prompt all its life: batch would never enter beside many such. And an
            # engine that tells no steps has none to guard; a whole answer's first token is its end there.
            self._gate.throttle.prefilled(seat.key)
        ended = Ended(usage.Outcome.ERROR, reason="the server stopped")
        self._tempo.opened(tap)
        try:
            try:
                ended = await self._run(call, seat, reply, identity.request_id)
            finally:
                self._tempo.closed(tap)
                self._engine.untap(identity.request_id)
                seat.release()
                said = (ended.reason, usage.ESTIMATED if tap.estimated else "")
                self._ledger.close(identity, tap, ended.outcome, "; ".join(filter(None, said)))
            if ended.outcome is not usage.Outcome.CLIENT_GONE:
                await reply.close(ended.error)
        finally:
            if stream is not None:
                stream.leave()

    async def _run(
        self, call: "_Call", seat: gate.Seat, reply: response.Response, request_id: str
    ) -> Ended:
        """Drive the engine's app until it is done or must stop; it has let go when this returns."""
        left = asyncio.Event()
        inner_scope = with_request_id(call.scope, request_id)
        inner = asyncio.create_task(
            _call(self._engine.app, inner_scope, replay(call.asked.body, left), reply.take)
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
                self.left_at_step = self._engine.stats().steps_total
                await self._stop(inner, request_id, left)
            for watcher in (gone, ordered_out):
                watcher.cancel()
        return self._interrupted(seat, reply)

    def _judge(self, inner: "asyncio.Task[None]", reply: response.Response) -> Ended:
        crash = inner.exception()
        if crash is not None and not isinstance(crash, engine.Refused):
            _log.error("engine app failed", exc_info=crash)
        if reply.refused:
            outcome = usage.Outcome.REFUSED if reply.status < 500 else usage.Outcome.ERROR
            return Ended(outcome, reason=f"the engine answered {reply.status}")
        error = reply.verdict(crash)
        if error is not None and self._engine.stats().failure:
            error = dataclasses.replace(error, code=_DEAD.get(error.code, error.code))
        if error is None:
            return Ended(usage.Outcome.OK)
        return Ended(_BY_CODE.get(error.code, usage.Outcome.ERROR), error, error.message)

    @staticmethod
    def _interrupted(seat: gate.Seat, reply: response.Response) -> Ended:
        if seat.why is None:
            return Ended(usage.Outcome.CLIENT_GONE, reason="the gateway's connection closed")
        kind, words = _ORDERED_OUT[seat.why]
        error = reply.counted(kind.code, words, kind.status)
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
    asked: asked.Asked

    @property
    def wants_frames(self) -> bool:
        wanted = frames.MEDIA_TYPE.encode()
        return any(k == b"accept" and wanted in v for k, v in self.scope["headers"])


async def _call(
    served: types.ASGIApp, scope: types.Scope, receive: types.Receive, send: types.Send
) -> None:
    await served(scope, receive, send)


def _number(scope: types.Scope, header: bytes) -> int:
    """Return what the gateway says in one of its headers, 0 if it says nothing."""
    for name, value in scope["headers"]:
        if name == header:
            return int(value) if value.isdigit() else 0
    return 0


def with_request_id(scope: types.Scope, key: str) -> types.Scope:
    """Return the scope that the engine's app sees: our request id, and none of our own headers."""
    ours = {b"x-forebay-identity", _PREEMPTED, trunks.HEADER.encode()}
    hidden = {b"x-request-id", b"authorization", b"accept", *ours}
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


async def send_full(send: types.Send, reason: str, stats: fleet.ReplicaStats) -> None:
    """Say that there is no seat, with fresh stats."""
    await answers.send_error(
        send, 429, "replica_full", f"replica full: {reason}", stats=dataclasses.asdict(stats)
    )
