"""What runs in the engine for each of our requests, and which token ids go out with which bytes.

Sits between vLLM's app and the replica's stack, and knows neither: engine outputs are taken as they
look (`prompt_token_ids`, `outputs[].token_ids`, …), ASGI messages as bytes.
"""

import collections
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette import types

from engines.replica import engine
from engines.vllm import ledger
from scheduler.contracts import requests, resume

TOGETHER = 16  # tokens of a batch sequence told at once: nobody reads along, and each telling costs as much
_ROLE_CHUNK = b'"role":"'  # in a text this would be escaped
_INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')
_RESPONSES = requests.Endpoint.RESPONSES.value
_RESPONSE = "resp_"
_CLASSIFY = requests.Endpoint.CLASSIFY.value
_BROKEN = frozenset({"abort", "error"})
_CLIENTS = frozenset({"VLLMClientError", "ValidationError"})  # vLLM's own, and pydantic's
NewSpeller = Callable[[], ledger.Speller | None]
"""Makes the speller of one more choice of a request."""


class Call:
    """One engine request (one prompt of an HTTP request) and its choices' ledgers."""

    def __init__(self, tap: engine.Tap, first_choice: int, new_speller: NewSpeller):
        self._tap = tap
        self._first = first_choice
        self._new_speller = new_speller
        self._ledgers: dict[int, ledger.Ledger] = {}
        self._chars: dict[int, int] = {}  # of each ledger's text, what was handed out
        self._prefilled = False
        self.begun = tap.begun
        self.min_tokens = 0  # as the request has it, where it goes on
        if self.begun is not None:
            book = self._ledgers[0] = ledger.Ledger(new_speller())
            book.begin(self.begun.token_ids, self.begun.shown, self.begun.chars)
            self._chars[0] = self.begun.chars

    def note(self, output: Any) -> None:
        """Take what the engine gave out: deltas of one or more choices."""
        tap = self._tap
        if not self._prefilled and output.prompt_token_ids is not None:
            self._prefilled = True
            tap.prefilled(len(output.prompt_token_ids), cached=output.num_cached_tokens or 0)
        for part in getattr(output, "outputs", None) or ():
            choice = self._first + part.index
            book = self._ledgers.get(choice)
            if book is None:
                book = self._ledgers[choice] = ledger.Ledger(self._new_speller())
            token_ids = list(part.token_ids)
            tap.sampled(len(token_ids))
            if part.finish_reason not in _BROKEN:
                book.add(token_ids, part.text, finished=part.finish_reason is not None)
            elif part.finish_reason == "abort":
                # The text of such an end is never sent; whoever goes on with the answer has its ids.
                book.add(token_ids, "")
                if not choice:
                    tap.ahead = book.ahead
            if part.finish_reason is not None:
                tap.finished(choice, part.finish_reason)

    def note_pooled(self, output: Any) -> None:
        """Take the result of an embedding or a class: only the prompt counts."""
        if output.finished:
            cached = getattr(output, "num_cached_tokens", 0) or 0
            self._tap.prefilled(len(output.prompt_token_ids), cached=cached)

    def release(self, choices: frozenset[int] | None = None) -> None:
        """Hand out the ids whose text goes out now: of ``choices``, or of all."""
        for choice, book in self._ledgers.items():
            if choices is None or choice in choices:
                chars = book.said - self._chars.get(choice, 0)
                self._chars[choice] = book.said
                self._tap.released(choice, book.release(), chars)
                if not choice:
                    self._tap.ahead = book.ahead

    @property
    def most_tokens(self) -> int:
        """The bound of each sequence's output that the engine shall keep, 0 if the request has its own."""
        return self._tap.most_tokens

    def cannot_go_on(self, why: str) -> None:
        """Note why the answer can't go on elsewhere, unless that is known."""
        self._tap.why_not = self._tap.why_not or why

    @property
    def priority(self) -> int:
        """The tier's band, which is vLLM's way round too: lower goes first."""
        return self._tap.band

    @property
    def told_seldom(self) -> bool:
        """Whether its tokens may be told several at once."""
        return self._tap.band >= requests.Tier.BATCH.band

    @property
    def several(self) -> bool:
        """Whether it has more than one choice."""
        return len(self._ledgers) > 1

    def failed(self, reason: str) -> None:
        """Note that the engine gave up."""
        self._tap.failed(reason)


class Calls:
    """The running engine requests by our request id."""

    def __init__(self, taps: engine.Taps) -> None:
        self._taps = taps
        self._running: dict[str, dict[str, Call]] = collections.defaultdict(dict)

    def owner(self, engine_id: str) -> tuple[str, int] | None:
        """Return our request id and the prompt's number for an engine's request id; None if not ours.

        The engine's are ``chatcmpl-<ours>``, ``cmpl-<ours>-<n>`` or ``embd-<ours>-<n>`` (``score-``,
        ``classify-``), and ``resp_<ours>_<n>`` where n counts the turns of one answer.
        """
        if engine_id.startswith(_RESPONSE):
            ours = engine_id[len(_RESPONSE) :].rpartition("_")[0]
            return None if self._taps.find(ours) is None else (ours, 0)
        rest = engine_id.partition("-")[2]
        if self._taps.find(rest) is not None:
            return rest, 0
        ours, _, number = rest.rpartition("-")
        if number.isdecimal() and self._taps.find(ours) is not None:
            return ours, int(number)
        return None

    def begin(
        self,
        engine_id: str,
        prompt: Any,
        choices: int,
        new_speller: NewSpeller,
    ) -> Call | None:
        """Open the call of an engine request; None for one that did not come through the stack."""
        owner = self.owner(engine_id)
        tap = None if owner is None else self._taps.find(owner[0])
        if owner is None or tap is None:
            return None
        if tap.begun is not None:
            tap.prompt(tap.begun.prompt_token_ids)
        elif isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
            tap.prompt(prompt["prompt_token_ids"])
        call = Call(tap, owner[1] * choices, new_speller)
        self._running[owner[0]][engine_id] = call
        return call

    def beginning(self, engine_id: str) -> resume.Resume | None:
        """Return the beginning of the answer that an engine request goes on with; None if it has none."""
        owner = self.owner(engine_id)
        tap = None if owner is None else self._taps.find(owner[0])
        return None if tap is None else tap.begun

    def find(self, engine_id: str) -> Call | None:
        """Return the call of an engine's request id; None if not ours."""
        owner = self.owner(engine_id)
        return None if owner is None else self._running.get(owner[0], {}).get(engine_id)

    def of(self, request_id: str) -> dict[str, Call]:
        """Return the calls of one of our requests, by engine request id."""
        return self._running.get(request_id, {})

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that has left."""
        self._running.pop(request_id, None)


class Releasing:
    """ASGI wrapper next to vLLM's app: hands token ids out with the bytes that hold their text."""

    def __init__(self, inner: types.ASGIApp, calls: Calls) -> None:
        self._inner = inner
        self._calls = calls

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Pass a request on, listening to its answer."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if scope["path"] == _CLASSIFY:  # of vLLM's own paths the only one without a version
            path = _CLASSIFY.removeprefix("/v1")
            scope = {**scope, "path": path, "raw_path": path.encode()}
        responses = scope["path"] == _RESPONSES
        if responses:
            receive = _named(receive, _RESPONSE + request_id)

        async def releasing(message: types.Message) -> None:
            body = message.get("body", b"")
            if message["type"] == "http.response.body" and not _opens(body):
                running = self._calls.of(request_id).values()
                mixed = not responses and (
                    len(running) > 1 or any(call.several for call in running)
                )
                said = _choices(body) if mixed and body.startswith(b"data:") else None
                for call in running:
                    call.release(said)
            await send(message)

        try:
            await self._inner(scope, receive, releasing)
        except Exception as crash:
            if (words := _blame(crash)) is None:
                raise
            raise engine.Refused(words) from crash


def _blame(crash: BaseException) -> str | None:
    """Return what a request did wrong, None if the failure is not its own.

    vLLM looks at some fields when a stream has its status already; its handlers can't answer then, and
    the web framework raises an error of its own from theirs.
    """
    at: BaseException | None = crash.__cause__
    while at is not None:
        if not _CLIENTS.isdisjoint(kind.__name__ for kind in type(at).__mro__):
            return " ".join(str(at).split())
        at = at.__cause__
    return None


def _opens(body: bytes) -> bool:
    """Whether bytes are the chunk that begins a chat stream: it names the role, and has no token's text.

    Text that came in it, or behind it in the same bytes, would reach the client without its ids.
    """
    if _ROLE_CHUNK not in body or body.count(b"data:") != 1:
        return False
    try:
        choices = json.loads(body.strip().removeprefix(b"data:"))["choices"]
        return not any(choice["delta"].get("content") for choice in choices)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _named(receive: types.Receive, name: str) -> types.Receive:
    """Put the response's id into the request's body, the only place where vLLM takes it from."""

    async def named() -> types.Message:
        message = await receive()
        if message["type"] != "http.request":
            return message
        try:
            body = json.loads(message["body"])
        except ValueError:
            return message  # vLLM refuses it in its own words
        if not isinstance(body, dict):
            return message
        return {**message, "body": json.dumps({**body, "request_id": name}).encode()}

    return named


def _choices(event: bytes) -> frozenset[int]:
    """Return the choices of which an event holds text."""
    return frozenset(int(number) for number in _INDEX.findall(event))
