"""The engine app's response on its way out: as frames for a gateway, or plain for an admin's curl.

Whatever the engine does, the reader must be able to tell a whole answer from a cut one: an error event,
an abort that nobody asked for, an exception or a stream without its last event becomes an ERROR frame,
never a quiet end. Answers other than 2xx pass as they are: the engine computed nothing.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette import types

from engines.replica import answers, engine, framing, gather, responses_api, seam, sse, strict, used
from scheduler.contracts import errors, frames

FRAMES_HEADERS = [
    (b"content-type", frames.MEDIA_TYPE.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Response:
    """Takes the ASGI messages of the engine's app and sends what the reader asked for.

    The last bytes are kept back until `close`, so that a usage row can be written before them. For a
    stream these are the event that ends its only choice and what follows, with ``[DONE]`` (or the finished
    response of `/v1/responses`) in a DATA frame of its own; else the whole JSON body.

    Args:
        send: the server's send.
        tap: the request's tap.
        framed: frames, or plain.
        request: the request's body; only one that asks for log probabilities can hold impossible ones.
        streams: says how many streams run here now, by which tokens are gathered in frames.
        path: what was asked.
        told: the ids of an answer that is not streamed go out as they come, for a reader that keeps them:
            every `engine.SOME` of them, or each second.
    """

    def __init__(
        self,
        send: types.Send,
        tap: engine.Tap,
        *,
        framed: bool,
        request: bytes = b"",
        streams: Callable[[], int] = lambda: 1,
        path: str = "",
        told: bool = False,
    ) -> None:
        self._responses = path == responses_api.PATH
        self._read = responses_api.read if self._responses else sse.read
        self._send = send
        self._tap = tap
        self._request = request
        self._logprobs = b"logprobs" in request
        self._framed = framed
        self._streams = streams
        self._headers: list[tuple[bytes, bytes]] = []
        self._begun = False  # the reader has got a status
        self._early = False  # before the engine had said one
        self._streaming = False
        self._body = bytearray()
        self._splitter = sse.Splitter()
        self._seam = seam.Seam(tap.begun) if tap.begun is not None else None
        self._ready: list[bytes] = []  # events that wait for the next ones
        self._first = False  # the first token has gone out
        self._opening = False  # only events that stand before the first token wait
        self._late: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()
        self._tail: list[bytes] = []  # events from the one on that ends the only choice
        self._done_event = b""
        self._framing = framing.Framing(tap)
        self._complete = False
        self._muted = False
        self._parting = b""  # frames of what waited when it was muted
        self._error: frames.Error | None = None
        self._finished: dict[int, str] = {}
        self.status = 0  # the engine's; 0 before it said one
        self._told = told and framed
        if framed:
            tap.on_some = self._progress if told else None
            tap.on_first.append(self._prefilled)

    @property
    def refused(self) -> bool:
        """Whether the engine answered other than 2xx, and the reader gets that as it is."""
        return self._failed and not self._early

    @property
    def _failed(self) -> bool:
        return self.status != 0 and not 200 <= self.status < 300

    def _prefilled(self) -> None:
        """Tell the reader of a whole answer, too, that its prompt is done: it may send the next one."""
        if not (self._streaming or self._begun or self.status):
            self._sender = asyncio.ensure_future(self._tell_prompt())

    async def _tell_prompt(self) -> None:
        async with self._order:
            if self._framing.begun or self._begun or self._muted or self.status:
                return
            if prompt := self._framing.prompt():
                self._early = True
                await self._put(prompt, more=True)
                self._again()

    def _again(self) -> None:
        if self._told and self._late is None and not self._muted:
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(gather.TOLD_S, self._progress)

    def _progress(self) -> None:
        """Tell the ids of a whole answer that have come since the last time."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._told and self._early and not (self._muted or self.status or self._streaming):
            self._sender = asyncio.ensure_future(self._tell_ids())

    async def _tell_ids(self) -> None:
        async with self._order:
            if not self._told or self._muted or self.status or self._tap.finish_reasons:
                return  # behind an answer's last token nobody could go on
            if parts := self._framing.data(b""):
                await self._put(b"".join(parts), more=True)
            self._again()

    def mute(self) -> None:
        """Let nothing more of the engine's app through; ids that come from now on have no text here."""
        self._muted = True
        self._parting = self._waiting()
        if self._late is not None:
            self._late.cancel()
            self._late = None

    async def take(self, message: types.Message) -> None:
        """Take one message of the engine's app: the `send` that it is given."""
        if self._muted or self._error is not None:
            return
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body":
            more = bool(message.get("more_body", False))
            self._complete = not more
            body = bytes(message.get("body", b""))
            if self.refused:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
            elif self._streaming:
                await self._events(body)
            else:
                self._body += body

    async def _start(self, message: types.Message) -> None:
        self.status = int(message["status"])
        self._headers = [(bytes(k).lower(), bytes(v)) for k, v in message.get("headers", [])]
        kind = dict(self._headers).get(b"content-type", b"")
        self._streaming = kind.startswith(b"text/event-stream")
        if self.refused:
            self._begun = True
            await self._send(message)

    async def _events(self, chunk: bytes) -> None:
        try:
            for event in self._splitter.feed(chunk):
                reading = self._read(event)
                self._error = self._fault(reading)
                if self._error is not None:
                    break
                self._finished.update(reading.finished)
                if reading.done:
                    self._done_event = self._last(event)
                elif not reading.skip:
                    self._opening = reading.opening
                    self._keep(event)
        except ValueError as error:
            self._error = self._lost(str(error))
        if not self._ready or self._tail or self._silent:
            return
        token = self._token
        enough = not self._first or len(self._ready) >= gather.tokens(self._streams())
        if not self._framed or self._error is not None or (token and enough):
            self._first = self._first or token
            await self._flush()
        elif self._late is None:
            self._late = asyncio.get_running_loop().call_later(gather.LATEST_S, self._flush_soon)

    @property
    def _token(self) -> bool:
        """Whether what waits may hold a token: of an engine that tells no ids, any event may."""
        return self._tap.pending or not self._tap.prompt_token_ids

    @property
    def _silent(self) -> bool:
        """Whether nothing of the answer has come yet: its opening goes out with the first token.

        Until then another replica may begin anew, and a refusal is still one.
        """
        return self._opening or (self._framed and not (self._first or self._token))

    def _keep(self, event: bytes) -> None:
        """Put an event where it goes out from: at once or nearly so, or with the last bytes."""
        event = self._true(event)
        if self._seam is not None:
            event = self._seam.event(event)
        # Whoever has the end of a choice can't be resumed, and would miss usage and [DONE].
        held = self._framed and (self._tail or (self._finished and self._tap.single))
        if event:
            (self._tail if held else self._ready).append(event)

    def _last(self, event: bytes) -> bytes:
        return responses_api.last(self._true(event)) if self._responses else event

    def _true(self, event: bytes) -> bytes:
        """Return an event in strict JSON, with the cached tokens where it counts any."""
        if self._logprobs:
            event = strict.event(event)
        return used.event(event, self._cached) if used.COUNTS.search(event) else event

    @property
    def _cached(self) -> int:
        begun = self._tap.begun
        return self._tap.cached_tokens if begun is None else begun.cached_tokens

    def _flush_soon(self) -> None:
        self._late = None
        if not (self._muted or self._tail):
            self._sender = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        """Send the events that wait, with the ids that the engine has handed out by now."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        async with self._order:
            if self._tail:
                return  # while it waited for its turn the end came: its ids are handed out, its text is kept
            ready = b"".join(self._ready)
            self._ready.clear()
            if ready:
                await self._data(ready, more=True)

    def _fault(self, reading: sse.Reading) -> frames.Error | None:
        """Return what is wrong with the answer, if this part of it says so."""
        if reading.error is not None:
            return self._engine_error(reading.error)
        if any(reason == "abort" for _, reason in reading.finished):
            return self._lost("the engine aborted the sequence")
        return None

    def _engine_error(self, error: sse.EngineError) -> frames.Error:
        if error.status < 500:
            return self.counted(errors.BadRequest.code, error.message, error.status)
        # It still reports: unless it is dead, what made it fail may be this request alone.
        return self._lost(error.message, errors.EngineFailed)

    def _lost(
        self, message: str, kind: type[errors.ReplicaLost] = errors.ReplicaLost
    ) -> frames.Error:
        return self.counted(kind.code, f"engine: {message}", kind.status)

    def counted(self, code: str, message: str, status: int) -> frames.Error:
        """Return an error with what the tap has counted."""
        tap = self._tap
        return frames.Error(
            code, message, status, tap.prompt_tokens, tap.cached_tokens, tap.output_tokens
        )

    def verdict(self, crash: BaseException | None = None) -> frames.Error | None:
        """Say, once the engine's app has returned, what is wrong with the answer; None if it is whole.

        Args:
            crash: what the app raised, if it did.
        """
        if self.refused:
            return None
        if self._error is None:
            self._error = self._find_fault(crash)
        return self._error

    def _crashed(self, crash: BaseException) -> frames.Error:
        if isinstance(crash, engine.Refused) and not self._tap.output_tokens:
            return self.counted(errors.BadRequest.code, str(crash), errors.BadRequest.status)
        # An engine that is dead says so itself; one that lives has failed on this request alone.
        return self._lost(f"{type(crash).__name__}: {crash}", errors.EngineFailed)

    def _find_fault(self, crash: BaseException | None) -> frames.Error | None:
        if self._tap.failure:
            return self._lost(self._tap.failure)
        if crash is not None:
            return self._crashed(crash)
        if self._failed:  # it refused the request after all, when the reader had its 200
            said = sse.read_json(_parsed(self._body)).error
            words = said.message if said is not None else f"it answered {self.status}"
            return self._engine_error(sse.EngineError(self.status, words))
        if not self._complete:
            return self._lost("the answer was not finished")
        if "abort" in self._tap.finish_reasons.values():  # not every formatter says so
            return self._lost("the engine aborted the sequence")
        if self._streaming:
            return None if self._done_event else self._lost("the stream ended before its end")
        value = _parsed(self._body)
        if value is None:
            return self._lost("the answer is not JSON")
        reading = responses_api.read_json(value) if self._responses else sse.read_json(value)
        self._finished.update(reading.finished)
        fault = self._fault(reading)
        if fault is None:
            try:
                filled = used.fill(value, self._cached) | used.unasked(value, self._request)
                raw = bytes(self._body)
                self._body[:] = strict.whole(raw, value, self._request, changed=filled)
            except strict.Unusable as error:
                return self.counted(errors.BadRequest.code, str(error), errors.BadRequest.status)
        return fault

    async def close(self, error: frames.Error | None) -> None:
        """Send the end: the kept last bytes and END, or ``error``."""
        self._told = False
        if self.refused:
            return  # every byte of it has passed already
        if error is None:
            await self._close_whole()
        elif self._framed:
            async with self._order:
                last = [
                    self._parting,
                    self._waiting(),
                    self._framing.rest(),
                    error.frame().encode(),
                ]
                await self._put(b"".join(last), more=False)
        else:
            await self._flush()
            await self._close_plain(error)

    async def _close_whole(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        async with self._order:
            last = self._done_event if self._streaming else bytes(self._body)
            if not self._framed:
                await self._put(b"".join([*self._ready, last]), more=False)
                return
            events = b"".join([*self._ready, *self._tail])
            parts = self._framing.data(events) if events else []
            parts += self._framing.data(last)
            parts.append(self._framing.end(self._finished).frame().encode())
            await self._put(b"".join(parts), more=False)

    def _waiting(self) -> bytes:
        """Return the frames of the events that wait for the next ones.

        Once the end waits too, the ids can't be told apart any more: whoever goes on says all of it again.
        """
        events = b"" if self._silent or self._tail else b"".join(self._ready)
        self._ready.clear()
        return b"".join(self._framing.data(events)) if events and self._framed else events

    async def _close_plain(self, error: frames.Error) -> None:
        body = answers.error_body(error.status, error.code, error.message)
        if self._begun:
            await self._put(sse.error_event(body), more=False)
        else:
            self._begun = True
            await answers.send_json(self._send, error.status, body)

    async def _data(self, payload: bytes, *, more: bool) -> None:
        """Send client bytes; framed, with the ids that the engine has handed out by now."""
        if not self._framed:
            await self._put(payload, more=more)
        elif parts := self._framing.data(payload):
            await self._put(b"".join(parts), more=more)

    async def _put(self, body: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            await self._send(self._head())
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _head(self) -> dict[str, Any]:
        if self._framed:
            return {"type": "http.response.start", "status": 200, "headers": FRAMES_HEADERS}
        headers = [pair for pair in self._headers if pair[0] != b"content-length"]
        return {"type": "http.response.start", "status": self.status or 200, "headers": headers}


def _parsed(body: bytearray) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
