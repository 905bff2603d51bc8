"""The simulated engine's OpenAI-compatible HTTP surface."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette import applications, requests, responses, routing

from engines.simulated import adapters, batching, bodies, core, shapes, stops, tokens
from scheduler.contracts import clock, ids, resume


@dataclasses.dataclass(slots=True)
class _Choice:
    """One choice on its way out."""

    index: int
    sequence: batching.Sequence
    text: stops.StopFilter
    said: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    characters: int = 0
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """What one output adds to a choice: text, the ids it stands for, and the end if it ends."""

    choice: _Choice
    text: str
    token_ids: tuple[int, ...]
    reason: str


class _Answer:
    """Turns the engine's outputs of one request into pieces of text."""

    def __init__(
        self, engine: core.SimulatedCore, asked: bodies.Generation, key: str, adapter: str = ""
    ) -> None:
        self._engine = engine
        self._key = key
        self._tap = engine.taps.find(key)
        begun = self._begun = self._tap.begun if self._tap is not None else None
        bound = self._tap.most_tokens if self._tap is not None else 0
        most = min(asked.max_tokens, bound or asked.max_tokens)
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
        if begun is not None:
            prompts = [begun.prompt_token_ids]
        self.choices = [
            _Choice(
                index,
                batching.Sequence(
                    key=f"{key}#{index}",
                    prompt=prompt,
                    max_tokens=most,
                    salt=_salt(asked.seed, index % asked.n, adapter),
                    ignore_eos=asked.ignore_eos,
                    min_tokens=asked.min_tokens,
                    given=len(begun.token_ids) if begun else 0,
                    output=list(begun.token_ids) if begun else [],
                ),
                stops.StopFilter(asked.stops),
            )
            for index, prompt in enumerate(prompts)
        ]
        self.prompt_tokens = sum(map(len, prompts)) // asked.n
        self.cached = begun.cached_tokens if begun else 0

    @property
    def used(self) -> dict[str, Any]:
        """The usage object so far."""
        output = sum(len(choice.sequence.output) for choice in self.choices)
        return shapes.usage(self.prompt_tokens, output, self.cached)

    async def pieces(self) -> AsyncIterator[_Piece]:
        """Yield pieces until every choice has ended."""
        by_key = {choice.sequence.key: choice for choice in self.choices}
        if self._begun is not None and (held := self._before(self.choices[0], self._begun)):
            yield held
        async for output in self._engine.generate(
            self._key, [choice.sequence for choice in self.choices]
        ):
            choice = by_key[output.key]
            self.cached += 0 if self._begun else output.cached
            if choice.reason:
                continue
            piece = self._piece(choice, output)
            self._tell(piece)
            if piece.text or piece.reason:
                yield piece

    def _tell(self, piece: _Piece) -> None:
        """Let the tap know which tokens the piece stands for."""
        if self._tap is None:
            return
        self._tap.released(piece.choice.index, piece.token_ids, len(piece.text))
        if not piece.choice.index:
            self._tap.ahead = piece.choice.text.ahead
        if piece.reason:
            self._tap.finished(piece.choice.index, piece.reason)

    def _before(self, choice: _Choice, begun: resume.Resume) -> _Piece | None:
        """Feed an answer's beginning; returns what its client has not got of it, if anything."""
        fed = [choice.text.feed(t, tokens.token_bytes(t)) for t in begun.token_ids]
        text = "".join(each.text for each in fed)
        choice.characters = begun.chars
        choice.said.append(text)
        released = [t for each in fed for t in each.token_ids]
        piece = _Piece(choice, text[begun.chars :], tuple(released[begun.shown :]), "")
        self._tell(piece)
        return piece if piece.text else None

    def _piece(self, choice: _Choice, output: batching.Output) -> _Piece:
        text, released = "", tuple[int, ...]()
        if output.token is not None:
            choice.token_ids.append(output.token)
            fed = choice.text.feed(output.token, tokens.token_bytes(output.token))
            text, released = fed.text, fed.token_ids
            if fed.stopped:
                choice.reason = "stop"
                self._engine.finish(output.key)
        if output.finish_reason and not choice.reason:
            choice.reason = output.finish_reason
            rest = choice.text.finish()
            text, released = text + rest.text, released + rest.token_ids
        choice.said.append(text)
        return _Piece(choice, text, released, choice.reason)


def _salt(seed: int | None, choice: int, adapter: str) -> bytes:
    parts = [b"adapter " + adapter.encode()] if adapter else []
    parts += [b"seed %d" % seed] if seed is not None else []
    return b" ".join([*parts, *([b"choice %d" % choice] if choice else [])])


class Surface:
    """The routes.

    Args:
        engine: the core that computes.
        time: the clock, for ``created``.
        loras: the adapters that are served too.
    """

    def __init__(
        self,
        engine: core.SimulatedCore,
        time: clock.Clock,
        loras: adapters.Loras | None = None,
    ) -> None:
        self._engine = engine
        self._clock = time
        self._loras = loras or adapters.Loras(engine.options, time)

    @property
    def _models(self) -> tuple[str, ...]:
        return (self._engine.options.model, *self._loras.names())

    def app(self) -> applications.Starlette:
        """Return the ASGI app."""
        return applications.Starlette(
            routes=[
                routing.Route("/v1/chat/completions", self._chat, methods=["POST"]),
                routing.Route("/v1/completions", self._completions, methods=["POST"]),
                routing.Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                routing.Route("/v1/rerank", self._rerank, methods=["POST"]),
                routing.Route("/v1/classify", self._classify, methods=["POST"]),
                routing.Route("/v1/models", self._list_models, methods=["GET"]),
            ]
        )

    async def _chat(self, request: requests.Request) -> responses.Response:
        return await self._generate(request, chat=True)

    async def _completions(self, request: requests.Request) -> responses.Response:
        return await self._generate(request, chat=False)

    async def _list_models(self, request: requests.Request) -> responses.Response:
        data = [
            {
                "id": name,
                "object": "model",
                "owned_by": "forebay",
                "max_model_len": self._engine.options.max_context,
            }
            for name in self._models
        ]
        return responses.JSONResponse({"object": "list", "data": data})

    async def _generate(self, request: requests.Request, *, chat: bool) -> responses.Response:
        context = self._engine.options.max_context
        try:
            body = _parse(await request.body())
            asked = bodies.generation(body, chat=chat, models=self._models, max_context=context)
            self._check_room(asked)
        except bodies.BodyError as error:
            return _refuse(error)
        key = request.headers.get("x-request-id") or ids.uuid7()
        prefix = "chatcmpl" if chat else "cmpl"
        shape = shapes.Shape(asked, f"{prefix}-{key}", self._clock.wall_us() // 1_000_000)
        answer = _Answer(self._engine, asked, key, self._loras.named(asked.model))
        if asked.stream:
            stream = self._stream(asked, shape, answer)
            return responses.StreamingResponse(stream, media_type="text/event-stream")
        try:
            async for _ in answer.pieces():
                pass
        except core.EngineDead as error:
            return _dead(error)
        return responses.JSONResponse(self._whole(asked, shape, answer))

    def _check_room(self, asked: bodies.Generation) -> None:
        longest = max(map(len, asked.prompts)) + asked.max_tokens
        if not self._engine.batch.fits(longest):
            raise bodies.BodyError(
                f"{longest} tokens do not fit the KV cache: ask for fewer", "max_tokens"
            )

    async def _stream(
        self, asked: bodies.Generation, shape: shapes.Shape, answer: _Answer
    ) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        try:
            async for piece in answer.pieces():
                events = shapes.event(shape.chunk([self._next(shape, piece)]))
                if piece.choice.index not in begun:
                    # In one piece: the tap has handed out the ids of what follows the opening.
                    begun.add(piece.choice.index)
                    events = self._opening(asked, shape, piece.choice) + events
                yield events
        except core.EngineDead as error:
            yield shapes.event(shapes.error(str(error), "InternalServerError", None, 500))
            yield shapes.DONE
            return
        if asked.include_usage:
            yield shapes.event(shape.chunk([], answer.used))
        yield shapes.DONE

    @staticmethod
    def _opening(asked: bodies.Generation, shape: shapes.Shape, choice: _Choice) -> bytes:
        if asked.chat:
            return shapes.event(shape.first(choice.index))
        if not asked.echo:
            return b""
        prompt = tokens.decode(choice.sequence.prompt)
        return shapes.event(shape.chunk([shape.piece(choice.index, prompt, None, None)]))

    @staticmethod
    def _next(shape: shapes.Shape, piece: _Piece) -> dict[str, Any]:
        choice = piece.choice
        fresh = tuple(choice.token_ids)
        choice.token_ids.clear()
        logprobs = shape.logprobs(fresh, choice.characters)
        choice.characters += len(piece.text)
        return shape.piece(choice.index, piece.text, logprobs, piece.reason or None)

    @staticmethod
    def _whole(asked: bodies.Generation, shape: shapes.Shape, answer: _Answer) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for choice in answer.choices:
            text = "".join(choice.said)
            if asked.echo:
                text = tokens.decode(choice.sequence.prompt) + text
            logprobs = shape.logprobs(choice.token_ids)
            choices.append(shape.choice(choice.index, text, logprobs, choice.reason))
        return shape.whole(choices, answer.used)

    async def _embeddings(self, request: requests.Request) -> responses.Response:
        return await self._pooled(request, bodies.embedding_inputs, shapes.embeddings)

    async def _classify(self, request: requests.Request) -> responses.Response:
        return await self._pooled(request, bodies.embedding_inputs, shapes.classes)

    async def _rerank(self, request: requests.Request) -> responses.Response:
        return await self._pooled(request, bodies.ranked_inputs, shapes.ranked)

    async def _pooled(
        self,
        request: requests.Request,
        read: Callable[[Any, Sequence[str], int], list[tuple[int, ...]]],
        answer: Callable[[Sequence[Sequence[int]], str, Mapping[str, Any]], dict[str, Any]],
    ) -> responses.Response:
        try:
            body = _parse(await request.body())
            inputs = read(body, self._models, self._engine.options.max_context)
        except bodies.BodyError as error:
            return _refuse(error)
        key = request.headers.get("x-request-id") or ids.uuid7()
        sequences = [
            batching.Sequence(key=f"{key}#{index}", prompt=prompt, max_tokens=0)
            for index, prompt in enumerate(inputs)
        ]
        try:
            async for _ in self._engine.generate(key, sequences):
                pass
        except core.EngineDead as error:
            return _dead(error)
        model = str(body.get("model") or self._models[0])
        return responses.JSONResponse(answer(inputs, model, body))


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise bodies.BodyError(f"the body is not JSON: {error}") from error


def _refuse(error: bodies.BodyError) -> responses.Response:
    kind = "NotFoundError" if error.status == 404 else "BadRequestError"
    body = shapes.error(str(error), kind, error.param, error.status)
    return responses.JSONResponse(body, status_code=error.status)


def _dead(error: core.EngineDead) -> responses.Response:
    body = shapes.error(str(error), "InternalServerError", None, 500)
    return responses.JSONResponse(body, status_code=500)
